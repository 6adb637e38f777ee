"""BAPO's loss: the clipped surrogate of PPO (Eq. 4) with bounds that are searched or fixed.

The presets of ``bapo_megatron.algo.bapo`` say which; GRPO's and clip-higher's are fixed.
Equation numbers are the paper's (arXiv 2510.18927).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from bapo_megatron.algo.bapo import (
    clipped_tokens,
    contributions,
    gradient_factor,
    measured_sums,
    policy_loss,
)
from bapo_megatron.algo.bounds import (
    Bounds,
    BoundsConfig,
    high_values,
    low_values,
    positive_share,
    search_bounds,
    sum_count,
)
from bapo_megatron.algo.losses import Loss, LossTerms, Search
from bapo_megatron.algo.measurements import SEARCH, Measurement, PackView, UpdateSums
from bapo_megatron.algo.tokens import constant_on
from bapo_megatron.types import Metrics, MicroBatch, TokenFn, TokenStats


@dataclass(frozen=True)
class Found:
    """The bounds that a search has chosen, and the contribution there under every reading of Eq. 8."""

    bounds: Bounds
    contributions: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """The bounds and contributions under their metric names."""
        return {
            "bapo/clip_low": self.bounds.low,
            "bapo/clip_high": self.bounds.high,
            "bapo/contribution": self.bounds.contribution,
            "bapo/rounds": float(self.bounds.rounds),
            "bapo/reached": float(self.bounds.reached),
            **self.contributions,
        }


def contribution_fn(config: BoundsConfig) -> TokenFn:
    """The function that makes the sums of one pack for ``search``."""

    def sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
        log_ratio_T = stats.log_prob_T - batch.old_log_prob_T
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
    contribution = positive_share(positive, negative, config.share)
    bounds = replace(bounds, contribution=contribution, reached=contribution >= config.target)
    return Found(bounds, contributions(sums, bounds, config))


class _BapoSettings(Protocol):
    """The part of ``AlgorithmConfig`` that this loss reads."""

    @property
    def bounds(self) -> BoundsConfig:
        """The clipping bounds."""


class BapoLoss(Loss):
    """The clipped surrogate at the bounds of an update, found by Algorithm 1 or fixed."""

    bounds = "searched"
    search: Search

    def __init__(self, algorithm: _BapoSettings) -> None:
        """Reads ``algorithm.bounds`` alone."""
        self._config = config = algorithm.bounds
        size = 4 * sum_count(config)
        fixed = sum_count(config) == 2
        self.search = Search(
            contribution_fn(config),
            lambda sums: search(sums, config),
            config.scope,
            size,
            known=search(torch.zeros(size, dtype=torch.float64), config) if fixed else None,
        )
        self.measurements = (Measurement("bounds", 5 + 12, self._bounds_sums, self._bounds_metrics),)

    def terms(self, stats: TokenStats, batch: MicroBatch, found: Found) -> LossTerms:
        """Eq. 4 at the bounds of ``found``."""
        log_ratio_T = stats.log_prob_T - batch.old_log_prob_T
        fields = (log_ratio_T.detach(), batch.advantage_T, batch.mask_T, found.bounds)
        return LossTerms(
            policy_loss(log_ratio_T, batch.advantage_T, batch.weight_T, found.bounds),
            gradient_factor(*fields),
            clipped_tokens(*fields),
        )

    def _bounds_sums(self, view: PackView) -> Tensor:
        """Sums of the found bounds' metrics, each multiplied by the number of tokens that count."""
        values = constant_on(view.live_T.device, tuple(view.found.metrics().values()))
        tokens = view.live_T.sum()
        return torch.where(tokens > 0, tokens * values, 0.0)

    def _bounds_metrics(self, sums: Tensor, update: UpdateSums) -> Metrics:
        """The bounds of an update, judged by its own tokens, and their distance from the exact search's.

        Where packs had bounds of their own (``scope: micro_batch``) the means over the tokens are logged.
        ``..._distance`` costs nothing: the update's own sums give the exact bounds.
        """
        measured, config = update.parts[SEARCH], self._config
        exact = search(measured, config)
        found: Found | None = update.found
        if found or config.scope != "micro_batch":
            found = found or exact  # searched while the update held its forward passes
            used = at_bounds(found.bounds, measured, config).metrics()
        else:
            means = (number / update.tokens for number in sums.tolist())
            used = dict(zip(exact.metrics(), means, strict=True))
        return {
            **used,
            "bapo/clip_low_distance": used["bapo/clip_low"] - exact.bounds.low,
            "bapo/clip_high_distance": used["bapo/clip_high"] - exact.bounds.high,
        }
