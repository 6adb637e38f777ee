"""BAPO (arXiv 2510.18927): contribution sums (Eq. 8, Algorithm 1) and the clipped surrogate (Eq. 4).

    r_t = pi_theta / pi_old,    loss = -sum_t mask_t min(r_t A_t, clip(r_t, c_low, c_high) A_t)

``pi_old`` is the rollout's policy, or with ``algorithm.old_log_probs=trainer`` the trainer's own at the
start of the step. ``pi_rollout`` is always the policy that sampled: it is the weight in Eq. 8.

Pure functions on tensors, which ``losses/clip.py`` calls for chunks of a pack (a micro-batch of packed
sequences). The settings and the search are in ``bounds.py``. Sums are additive: the policy adds them over
packs and all-reduces them over ranks before the search.

A token is clipped by its float64 ``log r`` against ``math.log(bound)``, and a token exactly on a bound is
clipped. So the search and the loss agree about every token.

Legend: ``_T`` tokens of a pack. Per token: ``log r``, the advantage ``A``, and a mask, which is 0 for tokens
outside the loss (whatever their other fields hold, nan and inf included) and else the token's weight. Used in
``algo/losses/``, ``commands/``, ``data/`` and this folder.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    high_values,
    low_values,
    positive_share,
    sum_count,
)
from bapo_megatron.algo.sums import candidate_sums, histograms
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, check_shapes, constant_on, ratio, unmasked


@torch.no_grad()
def contribution_sums(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    rollout_log_prob_T: Tensor,
    mask_T: Tensor,
    config: BoundsConfig,
) -> Tensor:
    """Contribution sums (Eq. 8): ``P(c_high) = sum_{A>0} w A min(r, c_high)``, ``N(c_low)``: [H + L].

    At every candidate of both bounds, in one pass. With ``w = mask pi_rollout`` or ``w = mask``
    (``config.weight``) and ``r = pi_theta / pi_old``, by ``config.measure``:

    - ``surrogate`` (Eq. 8): ``P(c_high) = sum_{A > 0} w A min(r, c_high)`` and
      ``N(c_low) = sum_{A < 0} w |A| max(r, c_low)``
    - ``gradient`` (Eq. 5): ``P(c_high) = sum_{A > 0, r < c_high} w A r`` and
      ``N(c_low) = sum_{A < 0, r > c_low} w |A| r``, or ``w |A| max(r, 1)`` with ``negative_weight``
      ``first_pass``

    ``rollout_log_prob_T``, ``log pi_rollout``, is read if the weight asks for it.

    Returns:
        float64 ``[P(c_high_0), ..., P(c_high_H-1), N(c_low_0), ..., N(c_low_L-1)]`` on the device of the
        input. Additive: sums of parts of a batch add up to those of the batch. A nan in a token of the loss
        makes all of them nan.

    Raises:
        ValueError: if shapes differ, or the candidates of c_low and c_high overlap.
    """
    tokens = (log_ratio_T, advantage_T, rollout_log_prob_T, mask_T)
    return candidate_sums(histograms(*tokens, config, [config.weight], config.negative_weight)[0], config)


def all_measures(config: BoundsConfig) -> list[BoundsConfig]:
    """Readings of Eq. 8: ``config``, then each other combination of measure and weight, without repairs."""
    variants = [
        dataclasses.replace(config, measure=measure, weight=weight, negative_weight="present")
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
    group_T: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    """Contribution sums under every reading of Eq. 8, ``all_measures(config)``: [groups readings (H + L)].

    The first ``sum_count(config)`` numbers are for ``search_bounds``; the rest is for ``contributions``.
    Costs little more than ``contribution_sums``. With ``group_T``, the group of each token, there is such a
    vector for each of the ``groups``, one after the other.
    """
    weights: list[Weight] = list(get_args(Weight))
    tokens = (log_ratio_T, advantage_T, rollout_log_prob_T, mask_T)
    variants = all_measures(config)
    binned = {
        kind: histograms(*tokens, config, weights, kind, group_T, groups)
        for kind in dict.fromkeys(one.negative_weight for one in variants)
    }
    rows = [
        candidate_sums(binned[one.negative_weight][..., weights.index(one.weight), :, :, :], one)
        for one in variants
    ]
    return torch.cat(rows, -1).flatten()


def contributions(sums: Tensor, bounds: Bounds, config: BoundsConfig) -> dict[str, float]:
    """Contributions rho of the positive tokens (Eq. 8) at ``bounds``, under all twelve readings.

    From the (reduced) vector of ``measured_sums``: ``{"contribution/MEASURE_SHARE_WEIGHT": value}``, where a
    value is inf if the denominator alone is zero. ValueError if vector or bounds do not belong to ``config``.
    """
    rows = sums.reshape(-1, sum_count(config)).tolist()
    highs = high_values(config)
    high, low = highs.index(bounds.high), len(highs) + low_values(config).index(bounds.low)
    return {
        f"contribution/{one.measure}_{kind}_{one.weight}": positive_share(row[high], row[low], kind)
        for one, row in zip(all_measures(config), rows, strict=True)
        for kind in get_args(Share)
        if one.negative_weight == "present"
    }


class TokenBounds(NamedTuple):
    """Per-token clipping bounds, [T] each, where search groups have their own: in place of one ``Bounds``."""

    low_T: Tensor  # c_low
    high_T: Tensor  # c_high
    log_low_T: Tensor
    """``math.log`` of c_low, float64: log r is compared with it."""
    log_high_T: Tensor
    dual_clip: float | None

    @classmethod
    def of(cls, groups: Sequence[Bounds], group_T: Tensor) -> TokenBounds:
        """Bounds of each token, from those of each search group and the group of each token."""
        values = [(one.low, one.high, math.log(one.low), math.log(one.high)) for one in groups]
        table = constant_on(group_T.device, tuple(itertools.chain.from_iterable(values))).reshape(-1, 4)
        low_T, high_T, log_low_T, log_high_T = table[group_T].unbind(-1)
        return cls(low_T, high_T, log_low_T, log_high_T, groups[0].dual_clip)


def policy_loss(
    log_ratio_T: Tensor, advantage_T: Tensor, mask_T: Tensor, bounds: Bounds | TokenBounds
) -> Tensor:
    """PPO-clip loss (Eq. 4): ``-sum_t mask_t min(r_t A_t, clip(r_t, c_low, c_high) A_t)``, a scalar from [T].

    With a dual clip ``c`` a token with ``A < 0`` and ``r > c`` has the value ``c A``. float64, differentiable
    in ``log_ratio_T``; the gradient is exactly zero at tokens that are clipped, masked or beyond
    ``LOG_RATIO_LIMIT``. ValueError if shapes differ.
    """
    check_shapes(log_ratio_T, advantage_T, mask_T)
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
    """Clipped tokens, bool [T]: ``A > 0 and r >= c_high``, or ``A < 0 and r <= c_low``; not the dual clip.

    ValueError if shapes differ.
    """
    check_shapes(log_ratio_T, advantage_T, mask_T)
    log_ratio_T, advantage_T = unmasked(mask_T, log_ratio_T, advantage_T)
    above_T, below_T = _clipped(log_ratio_T, advantage_T, bounds)
    return above_T | below_T


@torch.no_grad()
def gradient_factor(
    log_ratio_T: Tensor, advantage_T: Tensor, mask_T: Tensor, bounds: Bounds | TokenBounds
) -> Tensor:
    """Gradient factor ``g = r X`` of each token (Eq. 7), float64 [T]: ``d loss / d log pi = -mask A g``.

    ``X`` is 0 where a bound, the dual clip or ``LOG_RATIO_LIMIT`` stops the gradient, else 1.
    """
    log_ratio_T, advantage_T = unmasked(mask_T, log_ratio_T, advantage_T)
    above_T, below_T = _clipped(log_ratio_T, advantage_T, bounds)
    alive_T = ~(above_T | below_T) & (log_ratio_T.abs() <= LOG_RATIO_LIMIT)
    if bounds.dual_clip is not None:
        alive_T &= (advantage_T >= 0) | (log_ratio_T <= math.log(bounds.dual_clip))
    return ratio(log_ratio_T) * alive_T


def _clipped(log_ratio_T: Tensor, advantage_T: Tensor, bounds: Bounds | TokenBounds) -> tuple[Tensor, Tensor]:
    """Masks of the tokens clipped above (A > 0) and below (A < 0); nan is in neither and reaches the loss."""
    if isinstance(bounds, TokenBounds):
        above_T, below_T = log_ratio_T >= bounds.log_high_T, log_ratio_T <= bounds.log_low_T
    else:
        above_T, below_T = log_ratio_T >= math.log(bounds.high), log_ratio_T <= math.log(bounds.low)
    return (advantage_T > 0) & above_T, (advantage_T < 0) & below_T
