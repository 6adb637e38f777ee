"""What an update measures and what it optimizes, as functions of the policy's token statistics.

The sums are additive over packs and ranks; the metrics come from them after the one reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bapo_megatron.algo.bapo import (
    Bounds,
    BoundsConfig,
    clip_fractions,
    clip_sums,
    clipped_tokens,
    contributions,
    high_values,
    low_values,
    measured_sums,
    policy_loss,
    search_bounds,
    share,
    sum_count,
)
from bapo_megatron.algo.diagnostics import DIAGNOSTIC_SUMS, diagnostic_metrics, diagnostic_sums
from bapo_megatron.algo.engine_gap import GAP_SUMS, gap_metrics, gap_sums
from bapo_megatron.algo.staleness import AGE_METRICS, BUCKET_SUMS, bucket_metrics, bucket_sums
from bapo_megatron.types import Metrics, MicroBatch, TokenFn, TokenStats


@dataclass(frozen=True)
class Found:
    """The bounds that a search has chosen, and the contribution there under every reading of Eq. 8."""

    bounds: Bounds
    contributions: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """All of it under the names of the log."""
        return {
            "bapo/clip_low": self.bounds.low,
            "bapo/clip_high": self.bounds.high,
            "bapo/contribution": self.bounds.contribution,
            "bapo/rounds": float(self.bounds.rounds),
            "bapo/reached": float(self.bounds.reached),
            **self.contributions,
        }


def contribution_fn(config: BoundsConfig) -> TokenFn:
    """The sums that ``search`` needs, of one pack."""

    def sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
        log_ratio_T = _log_ratio(stats, batch)
        return measured_sums(log_ratio_T, batch.advantage_T, batch.rollout_log_prob_T, batch.weight_T, config)

    return sums


def search(sums: Tensor, config: BoundsConfig) -> Found:
    """Algorithm 1 on the (reduced) sums of ``contribution_fn``."""
    bounds = search_bounds(sums[: sum_count(config)], config)
    return Found(bounds, contributions(sums, bounds, config))


def at_bounds(bounds: Bounds, sums: Tensor, config: BoundsConfig) -> Found:
    """The same bounds judged by other (reduced) sums of ``contribution_fn``."""
    rows = sums[: sum_count(config)].tolist()
    highs = high_values(config)
    positive = rows[highs.index(bounds.high)]
    negative = rows[len(highs) + low_values(config).index(bounds.low)]
    contribution = share(positive, negative, config.share)
    bounds = replace(bounds, contribution=contribution, reached=contribution >= config.target)
    return Found(bounds, contributions(sums, bounds, config))


def loss_fn(found: Found, config: BoundsConfig, version: int) -> TokenFn:
    """The clipped loss (Eq. 4) at the bounds of ``found``, followed by the sums behind ``update_metrics``.

    ``version`` is that of the policy in training: staleness counts from it, and the tokens that it sampled
    show the gap between engine and trainer.
    """
    measure = contribution_fn(config)

    def sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
        log_ratio_T = _log_ratio(stats, batch)
        loss = policy_loss(log_ratio_T, batch.advantage_T, batch.weight_T, found.bounds)
        with torch.no_grad():
            clipped_T = clipped_tokens(log_ratio_T, batch.advantage_T, batch.mask_T, found.bounds)
            rest = [
                _token_sums(stats, log_ratio_T, batch),
                clip_sums(log_ratio_T, batch.advantage_T, batch.mask_T, found.bounds),
                _found_sums(found, batch),
                _age_sums(stats, log_ratio_T, clipped_T, batch, version),
                _gap_sums(stats, batch, version),
                diagnostic_sums(stats, log_ratio_T, clipped_T, batch, found.bounds, version),
                measure(stats, batch),
            ]
        return torch.cat([loss[None], *rest])

    return sums


def update_metrics(sums: Tensor, found: Found | None, config: BoundsConfig) -> Metrics:
    """Metrics of an update from the reduced vector of ``loss_fn``: means over its tokens.

    ``found`` holds the bounds of the update; None where the update itself found them. Where packs had bounds
    of their own, the means over the tokens are logged. ``..._distance`` is how far the bounds used lie from
    those of the exact search, which the update's own sums give for nothing.
    """
    loss, token, clip, pack, age, gap, diagnostic = sums[:_MEASURED].split(_SECTIONS)
    tokens = max(float(token[0]), 1.0)
    entropy, kl, ratio_gap = (token[1:] / tokens).tolist()
    exact = search(measured(sums), config)
    if found or config.scope != "micro_batch":
        found = found or exact  # searched while the update held its forward passes
        used = at_bounds(found.bounds, measured(sums), config).metrics()
    else:
        used = {name: value / tokens for name, value in zip(exact.metrics(), pack.tolist(), strict=True)}
    return {
        "policy/loss": float(loss) / tokens,
        "policy/tokens": float(token[0]),
        "policy/entropy": entropy,
        "policy/kl": kl,
        "policy/ratio_gap": ratio_gap,
        **clip_fractions(clip),
        **used,
        "bapo/clip_low_distance": used["bapo/clip_low"] - exact.bounds.low,
        "bapo/clip_high_distance": used["bapo/clip_high"] - exact.bounds.high,
        **gap_metrics(gap),
        **bucket_metrics(age),
        **diagnostic_metrics(diagnostic),
    }


# The vector of ``loss_fn``: the loss, the token sums, the clip counts, what was found (five numbers and
# twelve readings of Eq. 8), the buckets of staleness, the engine's gap, the diagnostics; then the sums of the
# contributions.
_SECTIONS = (1, 4, 5, 5 + 12, BUCKET_SUMS, GAP_SUMS, DIAGNOSTIC_SUMS)
_MEASURED = sum(_SECTIONS)


def measured(sums: Tensor) -> Tensor:
    """The sums of ``contribution_fn`` in the vector of ``loss_fn``, at the weights before the update."""
    return sums[_MEASURED:]


def mean_entropy(sums: Tensor) -> float:
    """Nats per token, from the (reduced) vector of ``loss_fn``; 0 without tokens."""
    tokens, entropy = sums[_SECTIONS[0] :][:2].tolist()
    return float(entropy / max(tokens, 1.0))


def update_metric_names(config: BoundsConfig) -> list[str]:
    """Names of the metrics of an update, those of ``age_metrics`` included."""
    width = _MEASURED + 4 * sum_count(config)
    return [*update_metrics(torch.zeros(width, dtype=torch.float64), None, config), *AGE_METRICS]


def _log_ratio(stats: TokenStats, batch: MicroBatch) -> Tensor:
    return stats.log_prob_T - batch.old_log_prob_T


def _token_sums(stats: TokenStats, log_ratio_T: Tensor, batch: MicroBatch) -> Tensor:
    """Tokens, entropy, KL(rollout || policy), |log r|.

    KL by the estimator q - 1 - log q with q = pi / pi_rollout: its samples are pi_rollout's, whatever the
    denominator of the loss's ratio r.
    """
    live_T = batch.mask_T != 0
    log_q = (stats.log_prob_T - batch.rollout_log_prob_T)[live_T].double()
    return torch.stack(
        [
            live_T.sum().double(),
            stats.entropy_T[live_T].double().sum(),
            (log_q.exp() - 1 - log_q).sum(),
            log_ratio_T[live_T].double().abs().sum(),
        ]
    )


def _age_sums(
    stats: TokenStats, log_ratio_T: Tensor, clipped_T: Tensor, batch: MicroBatch, version: int
) -> Tensor:
    """The tokens by staleness."""
    staleness_T = version - batch.version_T
    return bucket_sums(staleness_T, batch.mask_T != 0, clipped_T, log_ratio_T, stats.entropy_T)


def _gap_sums(stats: TokenStats, batch: MicroBatch, version: int) -> Tensor:
    """Trainer against engine, over the tokens that the policy in training sampled."""
    same_weights_T = (batch.mask_T != 0) & (batch.version_T == version)
    return gap_sums(stats.log_prob_T, batch.rollout_log_prob_T, same_weights_T)


def _found_sums(found: Found, batch: MicroBatch) -> Tensor:
    """What was found, once for each token that counts."""
    row = list(found.metrics().values())
    values = torch.tensor(row, dtype=torch.float64, device=batch.mask_T.device)
    tokens = (batch.mask_T != 0).sum()
    return torch.where(tokens > 0, tokens * values, 0.0)
