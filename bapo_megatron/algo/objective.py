"""What an update measures and what it optimizes, as functions of the policy's token statistics.

The sums are additive over packs and ranks; the metrics come from them after the one reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bapo_megatron.algo.bapo import (
    Bounds,
    BoundsConfig,
    clip_fractions,
    clip_sums,
    contribution_sums,
    measured_sums,
    policy_loss,
    search_bounds,
)
from bapo_megatron.types import Metrics, MicroBatch, TokenFn, TokenStats


def contribution_fn(config: BoundsConfig) -> TokenFn:
    """The sums that ``search_bounds`` needs, under every measure, of one pack."""

    def sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
        return measured_sums(
            _log_ratio(stats, batch), batch.advantage_T, batch.rollout_log_prob_T, batch.weight_T, config
        )

    return sums


def loss_fn(bounds: Bounds | None, config: BoundsConfig, version: int) -> TokenFn:
    """The clipped loss (Eq. 4) of one pack, followed by the sums behind ``update_metrics``.

    ``bounds`` are those of the update; None searches them in each pack (``scope: micro_batch``).
    ``version`` is that of the policy in training: staleness counts from it.
    """

    def sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
        log_ratio_T = _log_ratio(stats, batch)
        used = bounds or _pack_bounds(log_ratio_T.detach(), batch, config)
        loss = policy_loss(log_ratio_T, batch.advantage_T, batch.weight_T, used)
        with torch.no_grad():
            rest = [
                _token_sums(stats, log_ratio_T, batch, version),
                clip_sums(log_ratio_T, batch.advantage_T, batch.mask_T, used),
                _bound_sums(used, batch),
            ]
        return torch.cat([loss[None], *rest])

    return sums


def update_metrics(sums: Tensor) -> Metrics:
    """Metrics of an update from the reduced vector of ``loss_fn``."""
    loss, *rest = sums.tolist()
    token, clip, bound = rest[:5], rest[5:10], rest[10:]
    tokens, packs = max(token[0], 1.0), max(bound[0], 1.0)
    return {
        "policy/loss": loss / tokens,
        "policy/entropy": token[1] / tokens,
        "policy/kl": token[2] / tokens,
        "policy/ratio_gap": token[3] / tokens,
        "rollout/staleness_mean": token[4] / tokens,
        **clip_fractions(clip),
        "bapo/clip_low": bound[1] / packs,
        "bapo/clip_high": bound[2] / packs,
        "bapo/contribution": bound[3] / packs,
        "bapo/rounds": bound[4] / packs,
        "bapo/reached": bound[5] / packs,
    }


UPDATE_METRICS = tuple(update_metrics(torch.zeros(17, dtype=torch.float64)))
"""Names of the metrics of an update."""


def _log_ratio(stats: TokenStats, batch: MicroBatch) -> Tensor:
    return stats.log_prob_T - batch.rollout_log_prob_T


def _pack_bounds(log_ratio_T: Tensor, batch: MicroBatch, config: BoundsConfig) -> Bounds:
    sums = contribution_sums(log_ratio_T, batch.advantage_T, batch.rollout_log_prob_T, batch.weight_T, config)
    return search_bounds(sums, config)


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


def _bound_sums(bounds: Bounds, batch: MicroBatch) -> Tensor:
    """1 and the bounds for a pack that holds tokens, else zeros: a dummy must not count."""
    row = [1.0, bounds.low, bounds.high, bounds.contribution, bounds.rounds, float(bounds.reached)]
    values = torch.tensor(row, dtype=torch.float64, device=batch.mask_T.device)
    return torch.where(batch.mask_T.any(), values, 0.0)
