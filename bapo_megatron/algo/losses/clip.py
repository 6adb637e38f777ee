"""PPO-clip loss (Eq. 4 of arXiv 2510.18927) with searched or fixed bounds: BAPO, GRPO, clip-higher.

    loss = -sum_t weight min(r A, clip(r, c_low, c_high) A),    r = pi / pi_old

``ClipLoss`` is the default, ``algorithm.loss=clip``. ``algorithm.bounds`` chooses the bounds, with presets in
``bapo_megatron.algo.bapo``. To search them, ``contribution_fn`` computes a pack's sums, and ``search_bounds``
(or ``search_groups``) maps the reduced sums to bounds. With ``algorithm.bounds.scope=micro_batch`` each
group, about ``bounds_tokens`` tokens of an update, has its own bounds. Groups depend only on the update's
data: they are the same for every rank, layout and pack length, and need packs of ``pack_samples``. With
``bounds_tokens=None`` the packs that all ranks process together are one group.

Legend: ``_T`` tokens of a pack (a micro-batch), ``_G`` search groups of an update.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

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
from bapo_megatron.algo.surrogate import (
    TokenBounds,
    clipped_tokens,
    contribution_sums,
    gradient_factor,
    policy_loss,
)
from bapo_megatron.algo.tokens import constant_on
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats
from bapo_megatron.types import Metrics


@functools.lru_cache(maxsize=8)
def group_of_sequences(trained_tokens: tuple[int, ...], bounds_tokens: int) -> tuple[int, ...]:
    """Search group of each sequence of an update: consecutive sequences, about ``bounds_tokens`` tokens each.

    The update's tokens are divided into ``n = max(1, round(total / bounds_tokens))`` equal intervals; a
    sequence belongs to the interval with its middle. An interval without a sequence is not a group.

    Args:
        trained_tokens: trained tokens of each sequence, in update order.
        bounds_tokens: tokens of a group.

    Returns:
        The group number of each sequence, ascending from 0 without gaps.
    """
    total = sum(trained_tokens)
    intervals = max(1, round(total / bounds_tokens))
    ends = accumulate(trained_tokens)
    # Integers, so that no layout rounds differently: (end - tokens / 2) * intervals / total.
    places = [
        min(intervals - 1, (2 * end - tokens) * intervals // max(1, 2 * total))
        for end, tokens in zip(ends, trained_tokens, strict=True)
    ]
    numbers = {interval: number for number, interval in enumerate(dict.fromkeys(places))}
    return tuple(numbers[interval] for interval in places)


def group_of_tokens(batch: MicroBatch, bounds_tokens: int) -> Tensor:
    """Search group of each token of a pack, int64 [T]; 0 for tokens outside the loss."""
    groups = (0, *group_of_sequences(batch.trained_tokens, bounds_tokens))
    return constant_on(batch.sequence_T.device, groups, torch.int64)[batch.sequence_T + 1]


def contribution_fn(config: BoundsConfig) -> TokenFn:
    """Return a token function (``TokenFn``) of a pack's contribution sums, for the searches below."""

    def sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
        log_ratio_T = stats.log_prob_T - batch.old_log_prob_T
        fields = (log_ratio_T, batch.advantage_T, batch.rollout_log_prob_T, batch.weight_T)
        if not config.grouped or config.bounds_tokens is None:
            return contribution_sums(*fields, config)
        group_T = group_of_tokens(batch, config.bounds_tokens)
        groups = 1 + max(group_of_sequences(batch.trained_tokens, config.bounds_tokens), default=0)
        return contribution_sums(*fields, config, group_T, groups)

    return sums


def search_groups(sums: Tensor, config: BoundsConfig) -> tuple[Bounds, ...]:
    """``search_bounds`` for each group, on the (reduced) sums of ``contribution_fn`` over the update."""
    return tuple(search_bounds(row, config) for row in sums.reshape(-1, sum_count(config)))


def at_bounds(bounds: Bounds, sums: Tensor, config: BoundsConfig) -> Bounds:
    """Return bounds with the contribution that other (reduced) sums have at them."""
    rows, highs = sums.tolist(), high_values(config)
    positive = rows[highs.index(bounds.high)]
    negative = rows[len(highs) + low_values(config).index(bounds.low)]
    contribution = positive_share(positive, negative, config.share)
    return replace(bounds, contribution=contribution, reached=contribution >= config.target)


class ClipLoss(Loss):
    """PPO-clip loss at an update's bounds, searched by Algorithm 1 or fixed.

    With ``bounds.scope=update`` or ``bounds_tokens`` the search needs the ratios of all tokens of the update
    before its first backward pass, which may cost a forward pass. Fixed and per-pack bounds do not, lagged
    ones only in the first update. The search raises FloatingPointError if its sums are not finite.
    """

    bounds = "searched"
    search: Search

    def __init__(self, algorithm: Any) -> None:
        """Read only ``algorithm.bounds``."""
        self._config: BoundsConfig = algorithm.bounds
        config = self._config
        size = sum_count(config)
        fixed = size == 2
        self.search = Search(
            contribution_fn(config),
            lambda sums: (search_groups if config.grouped else search_bounds)(sums, config),
            config.sums_over,
            0 if config.grouped else size,
            known=search_bounds([0.0] * size, config) if fixed else None,
        )
        self.measurements = (Measurement("bounds", 7, self._bounds_sums, self._bounds_metrics),)

    def terms(self, stats: TokenStats, batch: MicroBatch, found: Bounds | tuple[Bounds, ...]) -> LossTerms:
        """Return Eq. 4 at the bounds ``found``."""
        log_ratio_T = stats.log_prob_T - batch.old_log_prob_T
        bounds = TokenBounds.of(found, self._group_T(batch)) if isinstance(found, tuple) else found
        fields = (log_ratio_T.detach(), batch.advantage_T, batch.mask_T, bounds)
        return LossTerms(
            policy_loss(log_ratio_T, batch.advantage_T, batch.weight_T, bounds),
            gradient_factor(*fields),
            clipped_tokens(*fields),
        )

    def _group_T(self, batch: MicroBatch) -> Tensor:
        assert self._config.bounds_tokens is not None
        return group_of_tokens(batch, self._config.bounds_tokens)

    def _bounds_sums(self, view: PackView) -> Tensor:
        """Metrics of the searches, each multiplied by its number of tokens in the loss: [7]. A single table,
        because each costs a blocking copy to a GPU and a pass over the tokens."""
        searches = view.found if isinstance(view.found, tuple) else (view.found,)
        values = [tuple(search.metrics().values()) for search in searches]
        rows = constant_on(view.live_T.device, tuple(chain.from_iterable(values))).reshape(len(values), -1)
        if isinstance(view.found, tuple):
            live_T = view.live_T.double()
            tokens_G = rows.new_zeros(len(rows)).index_add_(0, self._group_T(view.batch), live_T)
        else:
            tokens_G = view.live_T.sum()[None]
        return torch.where(tokens_G[:, None] > 0, tokens_G[:, None] * rows, 0.0).sum(0)

    def _bounds_metrics(self, sums: Tensor, update: UpdateSums) -> Metrics:
        """Metrics of an update's bounds: contribution on its own tokens, distance from the exact search.

        With several searches per update (``scope: micro_batch``) they are token means. ``..._distance`` costs
        no pass: the update's own sums give the exact bounds.
        """
        config = self._config
        measured = update.parts[SEARCH].reshape(-1, sum_count(config)).sum(0)
        exact = search_bounds(measured, config)
        if isinstance(update.found, Bounds):
            used = at_bounds(update.found, measured, config).metrics()
        else:
            means = (number / update.tokens for number in sums.tolist())
            used = dict(zip(exact.metrics(), means, strict=True))
        if sum_count(config) > 2:
            used["bapo/bounds_moved"] = float(used["bapo/rounds"] > 0)
        else:  # fixed bounds cannot move
            del used["bapo/moved_tokens"]
        return {
            **used,
            "bapo/clip_low_distance": used["bapo/clip_low"] - exact.low,
            "bapo/clip_high_distance": used["bapo/clip_high"] - exact.high,
        }
