"""What an update measures and what it optimizes, as functions of the policy's token statistics.

The sums are additive over packs and ranks; the metrics come from them after the one reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.algo.bapo import (
    Bounds,
    BoundsConfig,
    clip_fractions,
    clip_sums,
    contributions,
    measured_sums,
    policy_loss,
    search_bounds,
    sum_count,
)
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


def loss_fn(found: Found | None, config: BoundsConfig, version: int) -> TokenFn:
    """The clipped loss (Eq. 4) of one pack, followed by the sums behind ``update_metrics``.

    ``found`` is the update's search; None searches in each pack (``scope: micro_batch``). ``version`` is
    that of the policy in training: staleness counts from it.
    """
    measure = contribution_fn(config)

    def sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
        used = found or search(measure(stats, batch), config)
        log_ratio_T = _log_ratio(stats, batch)
        loss = policy_loss(log_ratio_T, batch.advantage_T, batch.weight_T, used.bounds)
        with torch.no_grad():
            rest = [
                _token_sums(stats, log_ratio_T, batch, version),
                clip_sums(log_ratio_T, batch.advantage_T, batch.mask_T, used.bounds),
                _found_sums(used, batch),
            ]
        return torch.cat([loss[None], *rest])

    return sums


def update_metrics(sums: Tensor, found: Found | None, config: BoundsConfig) -> Metrics:
    """Metrics of an update from the reduced vector of ``loss_fn``.

    Means over tokens; what the search says is ``found``, or its mean over the packs that hold tokens.
    """
    loss, *rest = sums.tolist()
    token, clip, (packs, *pack) = rest[:5], rest[5:10], rest[10:]
    tokens = max(token[0], 1.0)
    names = search(torch.zeros(4 * sum_count(config), dtype=torch.float64), config).metrics()
    means = {name: value / max(packs, 1.0) for name, value in zip(names, pack, strict=True)}
    return {
        "policy/loss": loss / tokens,
        "policy/entropy": token[1] / tokens,
        "policy/kl": token[2] / tokens,
        "policy/ratio_gap": token[3] / tokens,
        "rollout/staleness_mean": token[4] / tokens,
        **clip_fractions(clip),
        **(found.metrics() if found else means),
    }


def update_metric_names(config: BoundsConfig) -> list[str]:
    """Names of the metrics of an update."""
    width = 1 + 5 + 5 + 1 + 5 + 12
    return list(update_metrics(torch.zeros(width, dtype=torch.float64), None, config))


def _log_ratio(stats: TokenStats, batch: MicroBatch) -> Tensor:
    return stats.log_prob_T - batch.rollout_log_prob_T


def _token_sums(stats: TokenStats, log_ratio_T: Tensor, batch: MicroBatch, version: int) -> Tensor:
    """Tokens, entropy, KL(rollout || policy) by the estimator r - 1 - log r, |log r|, staleness."""
    live_T = batch.mask_T != 0
    log_ratio = log_ratio_T[live_T].double()
    return torch.stack(
        [
            live_T.sum().double(),
            stats.entropy_T[live_T].double().sum(),
            (log_ratio.exp() - 1 - log_ratio).sum(),
            log_ratio.abs().sum(),
            (version - batch.version_T[live_T]).double().sum(),
        ]
    )


def _found_sums(found: Found, batch: MicroBatch) -> Tensor:
    """1 and what was found, for a pack that holds tokens; else zeros: a dummy must not count."""
    row = [1.0, *found.metrics().values()]
    values = torch.tensor(row, dtype=torch.float64, device=batch.mask_T.device)
    return torch.where(batch.mask_T.any(), values, 0.0)
