"""BAPO (arXiv 2510.18927): the clipped surrogate (Eq. 4) and contribution sums (Eq. 8, Algorithm 1).

    r_t = pi_theta / pi_old,    loss = -sum_t mask_t min(r_t A_t, clip(r_t, c_low, c_high) A_t)

``policy_loss`` returns the loss of a pack or chunk, ``clipped_tokens`` and ``gradient_factor`` its per-token
effects, ``contribution_sums`` the sums for ``bounds.search_bounds``. ``pi_old`` is the rollout policy, or
with ``algorithm.old_log_probs=trainer`` the trainer's policy at the start of the step. ``pi_rollout`` is
always the sampling policy; its probability is the weight in Eq. 8.

Pure functions on tensors. Sums are additive: the policy adds them over packs and all-reduces them over ranks
before the search. They come from histograms of log r with the candidate bounds as bin edges: cumulative sums
over the bins give the sum at every candidate.

A token is clipped by its float64 ``log r`` against ``math.log(bound)``, inclusively, in both the search and
the loss, so that they agree on every token.

Legend: ``_T`` tokens of a pack. Per token: ``log r``, the advantage ``A``, and a mask, which is 0 for tokens
outside the loss (whose other fields may be anything, nan and inf included) or else the token's weight.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_megatron.algo.bounds import (
    Bounds,
    BoundsConfig,
    high_values,
    low_values,
)
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, constant_on, ratio, unmasked

_NEGATIVE, _POSITIVE = 0, 1


class TokenBounds(NamedTuple):
    """Clipping bounds c_low and c_high of each token and their logs, [T] each, where search groups of an
    update have different bounds; the loss takes them in place of one ``Bounds``."""

    low_T: Tensor  # c_low
    high_T: Tensor  # c_high
    log_low_T: Tensor
    """``math.log`` of c_low, float64, compared with log r."""
    log_high_T: Tensor
    dual_clip: float | None

    @classmethod
    def of(cls, groups: Sequence[Bounds], group_T: Tensor) -> TokenBounds:
        """Look up each token's bounds from its search group's."""
        values = [(bounds.low, bounds.high, math.log(bounds.low), math.log(bounds.high)) for bounds in groups]
        table = constant_on(group_T.device, tuple(itertools.chain.from_iterable(values))).reshape(-1, 4)
        low_T, high_T, log_low_T, log_high_T = table[group_T].unbind(-1)
        return cls(low_T, high_T, log_low_T, log_high_T, groups[0].dual_clip)


def policy_loss(
    log_ratio_T: Tensor, advantage_T: Tensor, mask_T: Tensor, bounds: Bounds | TokenBounds
) -> Tensor:
    """PPO-clip loss (Eq. 4): ``-sum_t mask_t min(r_t A_t, clip(r_t, c_low, c_high) A_t)``, a scalar from [T].

    With a dual clip ``c`` a token with ``A < 0`` and ``r > c`` has the value ``c A``. float64, differentiable
    in ``log_ratio_T``; the gradient is exactly zero at tokens that are clipped, masked or beyond
    ``LOG_RATIO_LIMIT``.
    """
    log_ratio_T, advantage_T = unmasked(mask_T, log_ratio_T, advantage_T)
    above_T, below_T = _clipped(log_ratio_T, advantage_T, bounds)
    ratio_T = ratio(log_ratio_T)
    low, high = bounds[:2] if isinstance(bounds, TokenBounds) else (bounds.low, bounds.high)
    ratio_T = torch.where(above_T, high, ratio_T)
    ratio_T = torch.where(below_T, low, ratio_T)
    if bounds.dual_clip is not None:
        beyond_T = (advantage_T < 0) & (log_ratio_T > math.log(bounds.dual_clip))
        ratio_T = torch.where(beyond_T, bounds.dual_clip, ratio_T)
    return -(mask_T.double() * advantage_T * ratio_T).sum()


@torch.no_grad()
def clipped_tokens(
    log_ratio_T: Tensor, advantage_T: Tensor, mask_T: Tensor, bounds: Bounds | TokenBounds
) -> Tensor:
    """Clipped tokens, bool [T]: ``A > 0 and r >= c_high``, or ``A < 0 and r <= c_low``; not the dual clip."""
    log_ratio_T, advantage_T = unmasked(mask_T, log_ratio_T, advantage_T)
    above_T, below_T = _clipped(log_ratio_T, advantage_T, bounds)
    return above_T | below_T


@torch.no_grad()
def gradient_factor(
    log_ratio_T: Tensor, advantage_T: Tensor, mask_T: Tensor, bounds: Bounds | TokenBounds
) -> Tensor:
    """Gradient factor ``g = r X`` of each token (Eq. 7), float64 [T]: ``d loss / d log pi = -mask A g``.
    ``X`` is 0 where a bound, the dual clip or ``LOG_RATIO_LIMIT`` stops the gradient, otherwise 1."""
    log_ratio_T, advantage_T = unmasked(mask_T, log_ratio_T, advantage_T)
    above_T, below_T = _clipped(log_ratio_T, advantage_T, bounds)
    alive_T = ~(above_T | below_T) & (log_ratio_T.abs() <= LOG_RATIO_LIMIT)
    if bounds.dual_clip is not None:
        alive_T &= (advantage_T >= 0) | (log_ratio_T <= math.log(bounds.dual_clip))
    return ratio(log_ratio_T) * alive_T


def _clipped(log_ratio_T: Tensor, advantage_T: Tensor, bounds: Bounds | TokenBounds) -> tuple[Tensor, Tensor]:
    """Masks of tokens clipped above (A > 0) and below (A < 0); nan is in neither and reaches the loss."""
    if isinstance(bounds, TokenBounds):
        above_T, below_T = log_ratio_T >= bounds.log_high_T, log_ratio_T <= bounds.log_low_T
    else:
        above_T, below_T = log_ratio_T >= math.log(bounds.high), log_ratio_T <= math.log(bounds.low)
    return (advantage_T > 0) & above_T, (advantage_T < 0) & below_T


@torch.no_grad()
def contribution_sums(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    rollout_log_prob_T: Tensor,
    mask_T: Tensor,
    config: BoundsConfig,
    group_T: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    """Contribution sums (Eq. 8) at every candidate of both bounds, [H + L]: P per c_high, N per c_low.

    With ``w = mask pi_rollout`` or ``w = mask`` (``config.weight``) and ``r = pi_theta / pi_old``, by
    ``config.measure``:

    - ``surrogate`` (Eq. 8): ``P(c_high) = sum_{A > 0} w A min(r, c_high)`` and
      ``N(c_low) = sum_{A < 0} w |A| max(r, c_low)``
    - ``gradient`` (Eq. 5): ``P(c_high) = sum_{A > 0, r < c_high} w A r`` and
      ``N(c_low) = sum_{A < 0, r > c_low} w |A| r``

    ``rollout_log_prob_T``, ``log pi_rollout``, matters only if the weight uses it. With ``group_T``, the
    group of each token, returns the vectors of all ``groups``, one after the other.

    Returns:
        float64 ``[P(c_high_0), ..., P(c_high_H-1), N(c_low_0), ..., N(c_low_L-1)]`` on the inputs' device,
        additive over parts of a batch. A nan in a token of the loss makes all of them nan.
    """
    width = len(low_values(config)) + len(high_values(config)) + 1
    log_ratio_T, advantage_T, log_prob_T = unmasked(mask_T, log_ratio_T, advantage_T, rollout_log_prob_T)
    edges = constant_on(log_ratio_T.device, _edges(config))
    bin_T = torch.bucketize(log_ratio_T, edges, right=True) + _POSITIVE * width * (advantage_T > 0)
    if group_T is not None:
        bin_T += 2 * width * group_T
    mass_T = advantage_T.abs() * mask_T
    if config.weight == "rollout_probability":
        mass_T *= log_prob_T.exp()
    histograms = [
        edges.new_zeros(groups * 2 * width).scatter_add_(0, bin_T, value_T).reshape(groups, 2, width)
        for value_T in (mass_T * ratio(log_ratio_T), mass_T)
    ]
    return _candidate_sums(torch.stack(histograms, 1), config).flatten()


def _candidate_sums(histogram: Tensor, config: BoundsConfig) -> Tensor:
    """Sums P at every c_high and N at every c_low, [..., H + L], from histograms over log r whose bins end at
    the candidates, [..., 2 (w |A| r; w |A|), 2 (negative; positive), candidates + 1]."""
    lows, highs = low_values(config), high_values(config)
    ratio_mass, mass = range(2)
    up_to, since = histogram.cumsum(-1), histogram.flip(-1).cumsum(-1).flip(-1)
    # c_high number k leaves a positive token unclipped in the bins up to L + k, c_low number k a negative one
    # in the bins after k.
    positive = up_to[..., ratio_mass, _POSITIVE, len(lows) : -1]
    negative = since[..., ratio_mass, _NEGATIVE, 1 : len(lows) + 1]
    if config.measure == "surrogate":
        high, low = (constant_on(histogram.device, tuple(bounds)) for bounds in (highs, lows))
        positive = positive + high * since[..., mass, _POSITIVE, len(lows) + 1 :]
        negative = negative + low * up_to[..., mass, _NEGATIVE, : len(lows)]
    # A nan must not hide in a bin ignored by every candidate.
    return torch.cat([positive, negative], -1) + 0.0 * histogram.sum()


@functools.lru_cache(maxsize=16)
def _edges(config: BoundsConfig) -> tuple[float, ...]:
    """Edges of log r from which a token is unclipped by each c_low, and clipped by each c_high. Unclipped by
    c_low means log r > log c_low, that is, from the next float on."""
    lows = (math.nextafter(math.log(low), math.inf) for low in low_values(config))
    return (*lows, *map(math.log, high_values(config)))
