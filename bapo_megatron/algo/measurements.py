"""Measurements of an update: additive sums over its tokens, and the metrics computed from them.

A ``Measurement`` is a pair of functions: ``sums`` of a pack (a vector, at the weights before the update) and
``metrics`` from the vector summed over packs and ranks. ``Objective`` calls both, and the policy all-reduces
the vectors with the loss. For a new metric write one (or call ``token_mean``) and add it to
``objective.MEASUREMENTS``, or to a loss's ``measurements``. This module has those for all tokens alike,
``diagnostics.py`` those by kind of token.

**Engine gap** (train-inference mismatch): engine and trainer compute one function with different kernels, in
different orders, perhaps at different precisions, which makes on-policy data slightly off-policy. A large or
growing gap can reveal an error: missing weight updates, another temperature, a broken kernel.

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences), ``_K`` its tokens in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bapo_megatron.algo.tokens import constant_on, live_sum, ratio, unmasked
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.types import Metrics


class LossTerms(NamedTuple):
    """Result of ``Loss.terms`` for a pack or chunk: the scalar loss to minimize; per token its gradient
    factor and whether the loss clips it."""

    loss: Tensor
    """float64 scalar, differentiable in ``stats.log_prob_T``: ``weight_T``-weighted sum over the tokens."""
    gradient_T: Tensor
    """Gradient factor ``g``, ``d loss / d log pi = -weight A g``, 0 without gradient; for PPO the ratio."""
    clipped_T: Tensor
    """bool: tokens clipped by the loss, for the clip fractions."""


@dataclass(frozen=True)
class PackView:
    """Input of ``Measurement.sums``: a pack, or a chunk of it, with its log-probs, its loss terms and the
    result of the loss's search. ``Objective`` calls ``sums`` under ``torch.no_grad``."""

    stats: TokenStats
    """Log-probs and entropies under the policy in training, nats."""
    batch: MicroBatch
    """Mask, weights, advantages and versions."""
    terms: LossTerms
    """The loss's per-token terms."""
    found: Any
    """The result of the loss's search; None without one."""
    version: int
    """Version of the policy in training, the reference for staleness."""

    @cached_property
    def live_T(self) -> Tensor:
        """bool: the tokens in the loss (mask not 0)."""
        return self.batch.mask_T != 0

    @cached_property
    def log_ratio_T(self) -> Tensor:
        """log(pi / pi_old) of each token, nats."""
        return self.stats.log_prob_T - self.batch.old_log_prob_T


@dataclass(frozen=True)
class UpdateSums:
    """Input of ``Measurement.metrics``: token count, search result, and every measurement's vector, summed
    over all packs and ranks of an update."""

    tokens: float
    """Tokens in the loss, at least 1 because it is a divisor."""
    found: Any
    """The result of a search before the update; None without one, or if each micro-batch has its own."""
    parts: Mapping[str, Tensor]
    """The summed vector of each measurement, and the search's under ``SEARCH``."""


@dataclass(frozen=True)
class Measurement:
    """Definition of metrics: ``sums``, a pack's vector of ``size`` sums, and ``metrics``, a dict of metrics
    from the vector's total over packs and ranks. ``sums`` runs for every chunk of every pack and should not
    make the host wait for a GPU."""

    name: str
    """Unique among the measurements of an objective."""
    size: int
    """Length of the vector."""
    sums: Callable[[PackView], Tensor]
    """The vector [size] of one pack, additive over packs and ranks; masked tokens must not count."""
    metrics: Callable[[Tensor, UpdateSums], Metrics]
    """Metrics by log name, from the summed vector; None where undefined, such as a share of no tokens."""


SEARCH = "search"
"""Key of a loss's search sums in ``UpdateSums.parts``."""


def share(part: float, whole: float) -> float | None:
    """The metric ``part / whole``; None if the whole is 0."""
    return part / whole if whole else None


def token_mean(name: str, values: Callable[[PackView], Tensor]) -> Measurement:
    """Measurement of the metric ``name``, the mean of ``values`` over the tokens in the loss.

    ``values`` returns one value per token of a pack, [T], whose masked ones are ignored; or [K] values for
    the tokens in the loss only, which makes the host wait on a GPU.
    """

    def sums(view: PackView) -> Tensor:
        value = values(view)
        whole = value.shape == view.live_T.shape
        return (live_sum(value, view.live_T) if whole else value.double().sum())[None]

    return Measurement(name, 1, sums, lambda sums, update: {name: float(sums) / update.tokens})


@torch.no_grad()
def ratio_moments(stats: TokenStats, batch: MicroBatch) -> Tensor:
    """Sums for ``effective_sample_size``: r, r^2 and 1 over the tokens in the loss, [3]."""
    [log_ratio_T] = unmasked(batch.mask_T, stats.log_prob_T - batch.old_log_prob_T)
    live_T, ratio_T = (batch.mask_T != 0).double(), ratio(log_ratio_T)
    return torch.stack([(live_T * ratio_T).sum(), (live_T * ratio_T.square()).sum(), live_T.sum()])


def effective_sample_size(sums: Tensor) -> float:
    """Normalised effective sample size ``(sum r)^2 / (n sum r^2)``, in (0, 1], from the (reduced) sums.

    1 if all ratios are equal, as on-policy, and without tokens; 1 / n if a single ratio outweighs all others.
    The share of n equally weighted tokens whose mean would have the same variance (Kish 1965).
    """
    total, squares, count = sums.tolist()
    return total**2 / (count * squares) if count else 1.0


def gate_mean(name: str) -> Measurement:
    """Measurement of a soft gate: the metric ``name`` is the mean of ``g / r``, 1 without a gate."""
    return token_mean(name, lambda view: view.terms.gradient_T / ratio(view.log_ratio_T.double()))


def _clip_sums(view: PackView) -> Tensor:
    """Numbers of positive tokens, of clipped positive and of clipped negative ones, by the advantage: [3]."""
    clipped_T, advantage_T = view.terms.clipped_T, view.batch.advantage_T
    positive_T, negative_T = view.live_T & (advantage_T > 0), view.live_T & (advantage_T < 0)
    counted = (positive_T, positive_T & clipped_T, negative_T & clipped_T)
    return torch.stack([flags_T.sum() for flags_T in counted]).double()


def _clip_fractions(sums: Tensor, update: UpdateSums) -> Metrics:
    positive, above, below = (sums / update.tokens).tolist()
    return {
        "bapo/clip_fraction_high": above,
        "bapo/clip_fraction_low": below,
        "bapo/positive_token_fraction": positive,
    }


CLIPPING = Measurement("clipping", 3, _clip_sums, _clip_fractions)
"""The clip fractions of the current loss."""

EFFECTIVE_SAMPLE_SIZE = Measurement(
    "ess",
    3,
    lambda view: ratio_moments(view.stats, view.batch),
    lambda sums, _update: {"policy/ess": effective_sample_size(sums)},
)
"""Normalised effective sample size of an update's ratios."""

_PER_OCTAVE = 4
_GAP_EDGES = tuple(2.0 ** (number / _PER_OCTAVE) for number in range(-20 * _PER_OCTAVE, 5 * _PER_OCTAVE + 1))
"""Histogram edges in nats, from 2^-20 (about 1e-6, the rounding of float32) to 32."""

GAP_SUMS = 2 + len(_GAP_EDGES) + 1
"""Length of the vector of ``gap_sums``."""


@torch.no_grad()
def gap_sums(log_prob_T: Tensor, rollout_log_prob_T: Tensor, same_weights_T: Tensor) -> Tensor:
    """Count, sum and histogram of ``|log pi_trainer - log pi_rollout|``: float64 [GAP_SUMS].

    A maximum is not additive over packs and ranks, but a histogram is: its last non-empty bin gives the
    maximum to a bin width. Log-probs are in nats; ``same_weights_T``: bool, tokens in the loss sampled by the
    current weights.
    """
    gap_T = (log_prob_T.double() - rollout_log_prob_T.double()).abs()
    bin_T = torch.bucketize(gap_T, constant_on(gap_T.device, _GAP_EDGES))
    count_T = same_weights_T.double()
    histogram = gap_T.new_zeros(len(_GAP_EDGES) + 1).scatter_add_(0, bin_T, count_T)
    return torch.cat([count_T.sum()[None], live_sum(gap_T, same_weights_T)[None], histogram])


def gap_metrics(sums: Tensor) -> Metrics:
    """Mean and maximum engine gap in nats, from (reduced) ``gap_sums``; None without tokens.

    The maximum is its bin's upper edge, so at least the true one and at most 19 % above it (2^(1/4)). Gaps up
    to 2^-20 are reported as 2^-20, gaps above 32 as inf.
    """
    count, total, *histogram = sums.tolist()
    if not count:
        return {"rollout/engine_gap_mean": None, "rollout/engine_gap_max": None}
    last = max(number for number, tokens in enumerate(histogram) if tokens)
    return {"rollout/engine_gap_mean": total / count, "rollout/engine_gap_max": (*_GAP_EDGES, math.inf)[last]}


def _gaps_of(view: PackView, own_keys: bool = False) -> Tensor:
    same_weights_T = view.live_T & (view.batch.version_T == view.version)
    if own_keys:
        same_weights_T &= view.batch.oldest_version_T == view.version
    return gap_sums(view.stats.log_prob_T, view.batch.rollout_log_prob_T, same_weights_T)


ENGINE_GAP = Measurement("engine_gap", GAP_SUMS, _gaps_of, lambda sums, _update: gap_metrics(sums))
"""The engine gap over tokens sampled by the current weights."""

ENGINE_GAP_OF_OWN_KEYS = replace(ENGINE_GAP, sums=partial(_gaps_of, own_keys=True))
"""``ENGINE_GAP`` for engines that keep keys and values of older weights: without responses begun by those."""
