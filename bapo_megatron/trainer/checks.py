"""Checks of a step's update metrics (engine gap, routes), and expert and route metrics.

``check_updates`` runs both; it is collective, and called once the step's metrics are written, so that a check
that stops the run leaves the numbers that explain it. A failed check is a warning and a run event, on rank 0;
an engine gap may also stop the run with GapError, on every rank. ``check_stored_routes``, before the updates,
raises ConfigError if stored rollouts lack needed routes. ``expert_metrics`` and ``route_metrics`` return:

    experts/imbalance_mean   tokens of a layer's busiest expert over the mean of its experts (1: all equally
                             busy), mean over the layers
    experts/imbalance_max    the same, maximum over the layers
    experts/router_entropy   entropy of the trainer's router over all experts in nats, -sum_e p_e ln p_e,
                             mean over tokens and layers; ln E if all are equally likely
    routes/known             share of the trained tokens with a route from the engine
    routes/unknown_tokens    positions without a route, including prompts: the trainer's routers choose
    routes/mismatch          share of tokens with a route that the trainer's router of a layer would send to
                             other experts, mean over the layers
    routes/engine_mismatch   the same, of trained tokens that the policy's present weights sampled

The ``experts/`` metrics cover all positions of an update, including prompts, of any mixture of experts. A
route is the set of experts that a token takes. Engine and trainer round differently, so nearly equal router
logits swap: for a tenth of the tokens in bfloat16 (arXiv 2510.11370), for more after a weight update. A share
near 1 at equal weights indicates routes of other tokens or layers, or an engine with other weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor

from bapo_megatron.config import AlgorithmConfig, RolloutConfig
from bapo_megatron.errors import ConfigError, GapError
from bapo_megatron.runtime.distributed import barrier
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.records.recorder import Recorder
from bapo_megatron.types import Metrics, StepHeader

FIRST_GAP_LIMIT = 0.5
"""Limit of the mean engine gap, in nats, in the first step of colocated engines. Kernels and precision cause
0.05; another model's weights, or a missing tensor, cause whole nats."""


def check_updates(run: Run, step: int, updates: Sequence[Metrics]) -> None:
    """Run all checks of the ``updates`` of ``step``, whose metrics are equal on every rank. Collective."""
    algorithm, recorder = run.config.algorithm, run.recorder
    check_route_mismatch(algorithm, step, updates, recorder)
    is_first = run.handover.is_colocated and step == run.first_step
    check_engine_gap(algorithm, step, updates, recorder, is_first)


def check_engine_gap(
    config: AlgorithmConfig,
    step: int,
    updates: Sequence[Metrics],
    recorder: Recorder | None,
    is_first: bool = False,
) -> None:
    """Check the engine gap (``algo/measurements.py``) of a recorded step. Collective.

    A gap above its limits is a warning or, by ``on_gap``, a GapError on every rank. ``updates``: the updates'
    metrics, equal on every rank. ``is_first``: whether these are the first updates of this start with
    colocated engines; a mean gap above ``FIRST_GAP_LIMIT``, or a larger ``gap_mean_limit`` (None: no limit),
    then means other weights and stops the run.
    """
    excess = list(gap_excess(config, updates))
    if not excess:
        return
    message = f"step {step}: engine and trainer differ about the same tokens: {'; '.join(excess)}"
    first = next((gap for update in updates if (gap := update.get("rollout/engine_gap_mean")) is not None), 0)
    limit = math.inf if config.gap_mean_limit is None else max(FIRST_GAP_LIMIT, config.gap_mean_limit)
    must_stop = is_first and not first <= limit  # nan is above any limit
    on_gap: Literal["warn", "stop"] = "stop" if must_stop else config.on_gap
    if recorder:
        recorder.engine_gap(step, message, on_gap)
    if on_gap == "stop":
        barrier()  # rank 0 must write the event before the first failing process ends the others
        way = "raise the limit" if must_stop else "raise the limit or set algorithm.on_gap=warn"
        also = f", and above {FIRST_GAP_LIMIT:g} in the first step of colocated engines" if must_stop else ""
        raise GapError(
            f"{message}{also}. Do the engines have the trainer's weights, temperature and precision? "
            f"If the gap is known and harmless, {way}"
        )


def gap_excess(config: AlgorithmConfig, updates: Sequence[Metrics]) -> Iterator[str]:
    """Yield a text for each engine gap above its limit, with both in nats."""
    limits = {"mean": config.gap_mean_limit, "max": config.gap_max_limit}
    for name, limit in limits.items():
        for update in updates:
            gap = update.get(f"rollout/engine_gap_{name}")
            if limit is not None and gap is not None and not gap <= limit:  # nan is above any limit
                yield (
                    f"rollout/engine_gap_{name} is {gap:.3g} nats, above algorithm.gap_{name}_limit={limit:g}"
                )


def check_route_mismatch(
    config: AlgorithmConfig, step: int, updates: Sequence[Metrics], recorder: Recorder | None
) -> None:
    """Warn, and record an event, if a recorded step's route mismatch is above the limit."""
    limit = config.route_mismatch_limit
    shares = [share for update in updates if (share := update.get("routes/engine_mismatch")) is not None]
    if recorder and limit is not None and shares and max(shares) > limit:
        recorder.warning(
            "routes_differ",
            step,
            f"step {step}: at the same weights engine and trainer send {max(shares):.1%} of the tokens to "
            f"different experts (routes/engine_mismatch), above algorithm.route_mismatch_limit={limit:g}. "
            "Rounding to bfloat16 does that to about a tenth: if rollout/engine_gap_mean is small, replay "
            "the routes, or raise the limit; else the engines have other weights, or the routes are of other "
            "tokens",
        )


ROUTE_NAMES = ("routes/known", "routes/unknown_tokens", "routes/mismatch", "routes/engine_mismatch")
"""Metrics of an update with routes."""

EXPERT_NAMES = ("experts/imbalance_mean", "experts/imbalance_max", "experts/router_entropy")
"""Metrics of an update of a mixture of experts."""


def expert_metrics(sums_LC: Tensor | None) -> Metrics:
    """Return the metrics of ``UpdateResult.experts``: empty for a dense model, None values without tokens."""
    if sums_LC is None:
        return {}
    load_LE, tokens_L, entropy_L = sums_LC[:, :-2], sums_LC[:, -2], sums_LC[:, -1]
    if not tokens_L.sum():
        return dict.fromkeys(EXPERT_NAMES)
    imbalance_L = load_LE.amax(1) / load_LE.mean(1)
    means = imbalance_L.mean(), imbalance_L.max(), entropy_L.sum() / tokens_L.sum()
    return dict(zip(EXPERT_NAMES, map(float, means), strict=True))


def route_metrics(sums: Tensor | None) -> Metrics:
    """Return the metrics of ``UpdateResult.routes``: empty without routes. A share of zero tokens is None."""
    if sums is None:
        return {}
    trained, known, unknown, routed, differing, same, same_differing = sums.tolist()
    shares = (known, trained), (differing, routed), (same_differing, same)
    of_trained, mismatch, engine = (part / whole if whole else None for part, whole in shares)
    return dict(zip(ROUTE_NAMES, (of_trained, unknown, mismatch, engine), strict=True))


def check_stored_routes(rollout: RolloutConfig, step: int, header: StepHeader) -> None:
    """Raise ConfigError, on every rank, if a stored response of ``step`` lacks routes that the run needs."""
    if rollout.route_replay == "off":
        return
    responses = [response for group in header.groups for response in group.responses]
    missing = sum(response.routes is None and response.tokens > 0 for response in responses)
    if missing:
        raise ConfigError(
            f"rollout.route_replay={rollout.route_replay}: {missing} of the {len(responses)} responses of "
            f"step {step} were stored without routes, before the run asked for them; set it to off, or begin "
            "a new run"
        )
