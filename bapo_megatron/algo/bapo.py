"""BAPO on tensors: the sums that Algorithm 1 needs, and the clipped loss. No torch.distributed.

Legend: ``_T`` tokens of a pack. Per token: ``r = pi_theta / pi_rollout`` (given as its logarithm), the
advantage ``A`` and a mask, which is 0 for tokens that do not count (whatever their other fields hold,
nan and inf included) and else the weight of the token in the loss.

Whether a token is clipped is always decided by its float64 ``log r`` against ``math.log(bound)``, and a
token exactly on a bound is clipped. So the search and the loss agree about every token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from bapo_megatron.algo.bounds import (
    Bounds,
    BoundsConfig,
    Measure,
    Share,
    Weight,
    balanced,
    clip_higher,
    fixed,
    grpo,
    high_values,
    low_values,
    paper,
    published_code,
    search_bounds,
    share,
    sum_count,
)

__all__ = [
    "LOG_RATIO_LIMIT",
    "Bounds",
    "BoundsConfig",
    "all_measures",
    "balanced",
    "clip_fractions",
    "clip_higher",
    "clip_sums",
    "contribution_sums",
    "contributions",
    "fixed",
    "grpo",
    "high_values",
    "low_values",
    "measured_sums",
    "paper",
    "policy_loss",
    "published_code",
    "search_bounds",
    "share",
    "sum_count",
]

LOG_RATIO_LIMIT = 20.0
"""``log r`` is clamped to plus or minus this before ``exp``, in sums and loss: the ratio stays finite.
A token beyond it has no gradient."""

CHUNK_TOKENS = 2**16
"""Tokens that the sums take at a time on a CPU, so that their float64 copies stay in the cache; other
devices take all at once."""

GRID_CELLS = 2**9
"""Cells of the grid that finds the interval of a token; with the presets none holds two edges."""

_NEGATIVE, _POSITIVE = 0, 1


@torch.no_grad()
def contribution_sums(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    rollout_log_prob_T: Tensor,
    mask_T: Tensor,
    config: BoundsConfig,
) -> Tensor:
    """The sums of positive and negative tokens at every candidate bound, in one pass over the tokens.

    With ``w = mask * pi_rollout`` or ``w = mask`` (``config.weight``):

    - ``surrogate`` (Eq. 8): ``P(c_high) = sum_{A > 0} w A min(r, c_high)`` and
      ``N(c_low) = sum_{A < 0} w |A| max(r, c_low)``
    - ``gradient`` (Eq. 5): ``P(c_high) = sum_{A > 0, r < c_high} w A r`` and
      ``N(c_low) = sum_{A < 0, r > c_low} w |A| r``

    Args:
        log_ratio_T: ``log pi_theta - log pi_rollout`` of each token, natural logarithm.
        advantage_T: advantage of each token.
        rollout_log_prob_T: ``log pi_rollout`` of each token; read if the weight asks for it.
        mask_T: 0, or the weight of the token in the loss.
        config: candidates, measure and weight.

    Returns:
        float64 ``[P(c_high_0), ..., P(c_high_H-1), N(c_low_0), ..., N(c_low_L-1)]`` on the device of the
        input. Additive: sums of parts of a batch add up to those of the batch. A nan in a token that
        counts makes all of them nan.

    Raises:
        ValueError: if shapes differ, or the candidates of c_low and c_high overlap.
    """
    tokens = (log_ratio_T, advantage_T, rollout_log_prob_T, mask_T)
    return _candidate_sums(_histogram(*tokens, config, [config.weight])[0], config)


def all_measures(config: BoundsConfig) -> list[BoundsConfig]:
    """``config``, then the same with each other combination of measure and weight."""
    variants = [
        dataclasses.replace(config, measure=measure, weight=weight)
        for measure in get_args(Measure)
        for weight in get_args(Weight)
    ]
    return [config, *(variant for variant in variants if variant != config)]


@torch.no_grad()
def measured_sums(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    rollout_log_prob_T: Tensor,
    mask_T: Tensor,
    config: BoundsConfig,
) -> Tensor:
    """``contribution_sums`` of every config in ``all_measures(config)``, one after the other.

    The first ``sum_count(config)`` numbers are those for ``search_bounds``; the rest is for
    ``contributions``. Costs little more than ``contribution_sums``.
    """
    weights: list[Weight] = list(get_args(Weight))
    tokens = (log_ratio_T, advantage_T, rollout_log_prob_T, mask_T)
    histograms = _histogram(*tokens, config, weights)
    return torch.cat(
        [_candidate_sums(histograms[weights.index(one.weight)], one) for one in all_measures(config)]
    )


def contributions(sums: Tensor, bounds: Bounds, config: BoundsConfig) -> dict[str, float]:
    """The contribution of the positive tokens at ``bounds`` under every reading of Eq. 8.

    Args:
        sums: the (reduced) vector of ``measured_sums``.
        bounds: what ``search_bounds`` found with ``config``.
        config: the config in use.

    Returns:
        ``{"contribution/MEASURE_SHARE_WEIGHT": value}`` for all twelve; a value is inf where the
        denominator alone is zero.

    Raises:
        ValueError: if the vector or the bounds do not belong to ``config``.
    """
    rows = sums.reshape(-1, sum_count(config)).tolist()
    highs = high_values(config)
    high, low = highs.index(bounds.high), len(highs) + low_values(config).index(bounds.low)
    return {
        f"contribution/{one.measure}_{kind}_{one.weight}": share(row[high], row[low], kind)
        for one, row in zip(all_measures(config), rows, strict=True)
        for kind in get_args(Share)
    }


def policy_loss(log_ratio_T: Tensor, advantage_T: Tensor, mask_T: Tensor, bounds: Bounds) -> Tensor:
    """Minus the clipped surrogate of Eq. 4, summed over tokens with ``mask_T`` as their weight.

    ``loss = -sum_t mask_t min(r_t A_t, clip(r_t, c_low, c_high) A_t)``. With a dual clip ``c`` a token with
    ``A < 0`` and ``r > c`` has the value ``c A``.

    Args:
        log_ratio_T: ``log pi_theta - log pi_rollout``; the loss is differentiable in it.
        advantage_T: advantage of each token.
        mask_T: 0, or the weight of the token in the loss.
        bounds: the clipping bounds.

    Returns:
        float64 scalar. The gradient is exactly zero at tokens that are clipped, masked or beyond
        ``LOG_RATIO_LIMIT``.

    Raises:
        ValueError: if shapes differ.
    """
    _check_shapes(log_ratio_T, advantage_T, mask_T)
    log_ratio_T, advantage_T = _unmasked(mask_T, log_ratio_T, advantage_T)
    above_T, below_T = _clipped(log_ratio_T, advantage_T, bounds)
    ratio_T = _ratio(log_ratio_T)
    ratio_T = torch.where(above_T, bounds.high, ratio_T)
    ratio_T = torch.where(below_T, bounds.low, ratio_T)
    if bounds.dual_clip is not None:
        beyond_T = (advantage_T < 0) & (log_ratio_T > math.log(bounds.dual_clip))
        ratio_T = torch.where(beyond_T, bounds.dual_clip, ratio_T)
    return -(mask_T.double() * advantage_T * ratio_T).sum()


@torch.no_grad()
def clip_sums(log_ratio_T: Tensor, advantage_T: Tensor, mask_T: Tensor, bounds: Bounds) -> Tensor:
    """Counts behind ``clip_fractions``: float64, additive over packs and ranks.

    Returns:
        ``[tokens, positive tokens, negative tokens, positive clipped above, negative clipped below]``,
        where a token counts once if its mask is not 0, and positive and negative are signs of advantage.

    Raises:
        ValueError: if shapes differ.
    """
    _check_shapes(log_ratio_T, advantage_T, mask_T)
    log_ratio_T, advantage_T = _unmasked(mask_T, log_ratio_T, advantage_T)
    above_T, below_T = _clipped(log_ratio_T, advantage_T, bounds)
    counted = (mask_T != 0, advantage_T > 0, advantage_T < 0, above_T, below_T)
    return torch.stack([flags_T.sum() for flags_T in counted]).double()


def clip_fractions(sums: Tensor | Sequence[float]) -> dict[str, float]:
    """Fractions of all counted tokens, from the (reduced) ``clip_sums``; 0 where there are no tokens."""
    tokens, positive, _, above, below = (float(number) for number in sums)
    tokens = max(tokens, 1.0)
    return {
        "bapo/clip_fraction_high": above / tokens,
        "bapo/clip_fraction_low": below / tokens,
        "bapo/positive_token_fraction": positive / tokens,
    }


def _unmasked(mask_T: Tensor, *fields: Tensor) -> list[Tensor]:
    """The fields as float64, 0 at masked tokens. Selected, not multiplied: 0 * nan would be nan."""
    live_T = mask_T != 0
    return [torch.where(live_T, field_T, 0.0).double() for field_T in fields]


def _ratio(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clipped(log_ratio_T: Tensor, advantage_T: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Which tokens are clipped above (A > 0) and below (A < 0); nan is neither, so that it shows."""
    above_T = (advantage_T > 0) & (log_ratio_T >= math.log(bounds.high))
    below_T = (advantage_T < 0) & (log_ratio_T <= math.log(bounds.low))
    return above_T, below_T


def _check_shapes(*fields: Tensor) -> None:
    shapes = [tuple(field.shape) for field in fields]
    if len(set(shapes)) > 1:
        raise ValueError(f"the fields of the tokens differ in shape: {shapes}")


class _Grid(NamedTuple):
    first: float
    last: float

    def cell(self, log_ratio_T: Tensor) -> Tensor:
        """The cell of each token, 0 to GRID_CELLS; any for a nan."""
        scale = GRID_CELLS / (self.last - self.first)
        offset_T = log_ratio_T.clamp(self.first, self.last).sub_(self.first).mul_(scale)
        return offset_T.long().clamp_(0, GRID_CELLS)


@dataclasses.dataclass(frozen=True)
class _Intervals:
    """The intervals of log r between neighbouring candidates, numbered upwards from 0."""

    edges: Tensor
    """Ascending float64, first those of c_low: a token is past an edge if its log r >= the edge."""
    unclipped: tuple[float, float]
    """Smallest and largest log r in the middle interval: past the last c_low, not past the first c_high."""
    grid: _Grid
    """A uniform grid from the first edge to the last."""
    edges_before: Tensor
    """How many edges lie in grid cells before each grid cell."""
    edges_in_cell: int
    """Largest number of edges in one grid cell."""

    def find(self, log_ratio_T: Tensor) -> Tensor:
        """The interval of each token, that is ``torch.bucketize(log_ratio_T, edges, right=True)``.

        Several times as fast, for it does not branch: the grid cell of a token tells the edges in earlier
        cells, and only those in its own are compared. Exact whatever the rounding, which keeps the order:
        a number in an earlier cell is smaller. A nan goes into any interval.
        """
        interval_T = self.edges_before.index_select(0, self.grid.cell(log_ratio_T))
        next_edge = torch.cat([self.edges, self.edges.new_full((1,), math.nan)])
        for _ in range(self.edges_in_cell):
            interval_T += log_ratio_T >= next_edge.index_select(0, interval_T)
        return interval_T


@functools.lru_cache(maxsize=16)
def _intervals(config: BoundsConfig, device: torch.device) -> _Intervals:
    lows, highs = low_values(config), high_values(config)
    if lows[-1] >= highs[0]:
        raise ValueError(f"candidates of c_low (to {lows[-1]}) and c_high (from {highs[0]}) overlap")
    # A token is alive at c_low if log r > log c_low, that is from the next float on.
    past = [math.nextafter(math.log(low), math.inf) for low in lows] + [math.log(high) for high in highs]
    edges = torch.tensor(past, dtype=torch.float64)
    grid = _Grid(past[0], past[-1])
    cells = grid.cell(edges)
    return _Intervals(
        edges=edges.to(device),
        unclipped=(past[len(lows) - 1], math.nextafter(past[len(lows)], -math.inf)),
        grid=grid,
        edges_before=torch.searchsorted(cells, torch.arange(GRID_CELLS + 1)).to(device),
        edges_in_cell=int(cells.bincount().max()),
    )


def _histogram(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    rollout_log_prob_T: Tensor,
    mask_T: Tensor,
    config: BoundsConfig,
    weights: Sequence[Weight],
) -> Tensor:
    """Sums of ``w |A| r`` and of ``w |A|`` over the tokens between two neighbouring candidates.

    Most tokens are clipped by no candidate. Plain sums over them suffice, and stand for the middle
    interval; only the others are sorted into theirs.

    Returns:
        float64 [weights, 2 (w |A| r; w |A|), 2 (negative; positive), candidates + 1]: all that the sums
        at every candidate need, under either measure.
    """
    _check_shapes(log_ratio_T, advantage_T, rollout_log_prob_T, mask_T)
    fields = [field.reshape(-1) for field in (log_ratio_T, advantage_T, rollout_log_prob_T, mask_T)]
    intervals = _intervals(config, log_ratio_T.device)
    histogram = intervals.edges.new_zeros(len(weights), 2, 2, len(intervals.edges) + 1)
    middle = histogram[:, 0, :, len(low_values(config))]
    chunk = CHUNK_TOKENS if log_ratio_T.device.type == "cpu" else max(1, log_ratio_T.numel())
    left_out = [
        _add_unclipped(middle, tokens, weights, intervals).add_(number * chunk)
        for number, tokens in enumerate(zip(*(field_T.split(chunk) for field_T in fields), strict=True))
    ]
    for positions in torch.cat(left_out).split(chunk):
        if len(positions):
            _add_clipped(histogram.flatten(2), fields, positions, weights, intervals)
    return histogram


def _add_unclipped(
    middle: Tensor, fields: Sequence[Tensor], weights: Sequence[Weight], intervals: _Intervals
) -> Tensor:
    """Add ``w |A| r`` of the tokens that no candidate clips to ``middle`` [weights, 2 (negative; positive)].

    Nearly all the time of the sums goes here. So it works in place, and multiplies masked tokens with 0
    instead of selecting the others; where that does not give 0, a token is left out.

    Returns:
        Positions of the tokens left out: those that a candidate clips, and all with a nan or inf that
        matters, masked or not.
    """
    log_ratio_T, advantage_T, rollout_log_prob_T, mask_T = fields
    log_ratio_T = log_ratio_T.to(torch.float64, copy=True)
    left_out_T = log_ratio_T.clamp(*intervals.unclipped).sub_(log_ratio_T)
    left_out_T.mul_(advantage_T).clamp_(max=0.0)  # 0 where no candidate clips
    value_T = log_ratio_T.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_().mul_(advantage_T).mul_(mask_T)
    values = [
        value_T if weight == "uniform" else value_T * rollout_log_prob_T.double().exp() for weight in weights
    ]
    for value_T in values:
        left_out_T.add_(value_T, alpha=0.0)  # nan where the value is nan or inf
    left_out = left_out_T.nonzero().squeeze(1)
    for value_T, (negative, positive) in zip(values, middle, strict=True):
        value_T.index_fill_(0, left_out, 0.0)
        positive += _ordered_sum(value_T.clamp(min=0.0))
        negative -= _ordered_sum(value_T.clamp_(max=0.0))
    return left_out


def _ordered_sum(value_T: Tensor) -> Tensor:
    """The sum in the order of the tokens, so that zeros among them do not even change its rounding."""
    return value_T.cumsum_(0)[-1:].sum()


def _add_clipped(
    histogram: Tensor,
    fields: Sequence[Tensor],
    positions: Tensor,
    weights: Sequence[Weight],
    intervals: _Intervals,
) -> None:
    """Add ``w |A| r`` and ``w |A|`` of the tokens at ``positions``, which may be any, to ``histogram``.

    Args:
        histogram: [weights, 2 (w |A| r; w |A|), 2 * (candidates + 1)], first the negative tokens.
    """
    log_ratio_T, advantage_T, rollout_log_prob_T, mask_T = fields
    mask_T = mask_T.index_select(0, positions)
    log_ratio_T, advantage_T = _unmasked(
        mask_T, log_ratio_T.index_select(0, positions), advantage_T.index_select(0, positions)
    )
    positive_bins = _POSITIVE * (len(intervals.edges) + 1)
    bin_T = intervals.find(log_ratio_T).add_(advantage_T > 0, alpha=positive_bins)
    ratio_T = _ratio(log_ratio_T)
    for weight, (ratio_mass, mass) in zip(weights, histogram, strict=True):
        size_T = advantage_T.abs().mul_(mask_T)
        if weight == "rollout_probability":
            (log_prob_T,) = _unmasked(mask_T, rollout_log_prob_T.index_select(0, positions))
            size_T.mul_(log_prob_T.exp())
        mass.scatter_add_(0, bin_T, size_T)
        ratio_mass.scatter_add_(0, bin_T, size_T.mul_(ratio_T))


def _candidate_sums(histogram: Tensor, config: BoundsConfig) -> Tensor:
    """P at every c_high and N at every c_low, from the histogram [2, 2, candidates + 1] of one weight."""
    lows, highs = low_values(config), high_values(config)
    ratio_mass, mass = range(2)
    up_to, since = histogram.cumsum(-1), histogram.flip(-1).cumsum(-1).flip(-1)
    # A positive token is alive at c_high number k in the intervals up to L + k, a negative one at c_low
    # number k in the intervals after k.
    positive = up_to[ratio_mass, _POSITIVE, len(lows) : -1]
    negative = since[ratio_mass, _NEGATIVE, 1 : len(lows) + 1]
    if config.measure == "surrogate":
        positive = positive + positive.new_tensor(highs) * since[mass, _POSITIVE, len(lows) + 1 :]
        negative = negative + negative.new_tensor(lows) * up_to[mass, _NEGATIVE, : len(lows)]
    # A nan must not hide in an interval that no candidate counts.
    return torch.cat([positive, negative]) + 0.0 * histogram.sum()
