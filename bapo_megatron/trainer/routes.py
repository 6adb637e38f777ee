"""Routes (the experts that each token takes in a mixture-of-experts model) in the loop: their metrics.

    experts/imbalance_mean   tokens of a layer's busiest expert over the mean of its experts, 1 where all are
                             as busy: the mean over the layers
    experts/imbalance_max    the same, of the layer with the largest
    experts/router_entropy   entropy of the trainer's router over all experts in nats, -sum_e p_e ln p_e, in
                             the mean over tokens and layers; ln E where all are as likely
    routes/known             share of the trained tokens whose route the engine gave
    routes/unknown_tokens    positions without one, prompts included: the trainer's routers choose for them
    routes/mismatch          share of tokens with a route that the trainer's router of a layer would send to
                             other experts, in the mean over the layers
    routes/engine_mismatch   the same, of trained tokens that the policy's present weights sampled

The ``experts/`` ones are of all positions of an update, prompts included, and of any mixture of experts.
Engine and trainer round differently, so nearly equal router logits change places: those of a tenth of the
tokens in bfloat16 (arXiv 2510.11370), and after an update of the weights of more. At the same weights a share
near 1 is a sign of routes of other tokens or layers, or of an engine with other weights: a warning. Stored
rollouts without routes: ConfigError. Used by ``train.py``.
"""

from __future__ import annotations

from torch import Tensor

from bapo_megatron.config import RolloutConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.types import Metrics, StepHeader

NAMES = ("routes/known", "routes/unknown_tokens", "routes/mismatch", "routes/engine_mismatch")
"""The metrics of an update with routes."""

EXPERT_NAMES = ("experts/imbalance_mean", "experts/imbalance_max", "experts/router_entropy")
"""The metrics of an update of a mixture of experts."""


def router_names(rollout: RolloutConfig, has_experts: bool) -> tuple[str, ...]:
    """Names of the metrics that ``route_metrics`` and ``expert_metrics`` return in a run."""
    return (*(EXPERT_NAMES if has_experts else ()), *(() if rollout.route_replay == "off" else NAMES))


def expert_metrics(sums_LC: Tensor | None) -> Metrics:
    """Metrics of ``UpdateResult.experts``; none of a dense model. Of no tokens they are None."""
    if sums_LC is None:
        return {}
    load_LE, tokens_L, entropy_L = sums_LC[:, :-2], sums_LC[:, -2], sums_LC[:, -1]
    if not tokens_L.sum():
        return dict.fromkeys(EXPERT_NAMES)
    imbalance_L = load_LE.amax(1) / load_LE.mean(1)
    found = imbalance_L.mean(), imbalance_L.max(), entropy_L.sum() / tokens_L.sum()
    return dict(zip(EXPERT_NAMES, map(float, found), strict=True))


def route_metrics(sums: Tensor | None) -> Metrics:
    """Metrics of ``UpdateResult.routes``; none without routes. A share of nothing is None."""
    if sums is None:
        return {}
    trained, known, unknown, routed, differing, same, same_differing = sums.tolist()
    shares = (known, trained), (differing, routed), (same_differing, same)
    of_trained, mismatch, engine = (part / whole if whole else None for part, whole in shares)
    return dict(zip(NAMES, (of_trained, unknown, mismatch, engine), strict=True))


def check_stored_routes(rollout: RolloutConfig, step: int, header: StepHeader) -> None:
    """ConfigError, on every rank, if a response of ``step`` was stored without routes that the run needs."""
    if rollout.route_replay == "off":
        return
    responses = [one for group in header.groups for one in group.responses]
    missing = sum(one.routes is None and one.tokens > 0 for one in responses)
    if missing:
        raise ConfigError(
            f"rollout.route_replay={rollout.route_replay}: {missing} of the {len(responses)} responses of "
            f"step {step} were stored without routes, before the run asked for them; set it to off, or begin "
            "a new run"
        )
