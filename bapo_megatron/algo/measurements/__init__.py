"""Measurements of an update: additive sums over its tokens, and the metrics computed from them.

Every rank computes the sums of its own packs, at the weights before the update; the policy all-reduces them
with the loss, and the metrics are computed from the result (``algo/objective.py``). A new metric is one
entry: write a ``Measurement`` (or a ``token_mean``) and add it to ``MEASUREMENTS`` there, or to the
``measurements`` of a loss.

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences), ``_K`` those of them that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from bapo_megatron.algo.tokens import live_sum, ratio
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.types import Metrics


class LossTerms(NamedTuple):
    """Result of ``Loss.terms`` for a pack or a chunk of it, as plain data: loss, and terms of each token.

    The policy minimizes the loss; measurements read the terms.
    """

    loss: Tensor
    """float64 scalar, differentiable in ``stats.log_prob_T``: the sum over the pack's tokens, each with its
    ``weight_T``. The optimizer step divides it by the update's count of tokens."""
    gradient_T: Tensor
    """Gradient factor ``g`` of each token, ``d loss / d log pi = -weight A g``; 0 where the token has no
    gradient. PPO's: the ratio, or 0 where it is clipped."""
    clipped_T: Tensor
    """bool: the tokens that the loss clips, for the clip fractions."""


@dataclass(frozen=True)
class PackView:
    """Input of ``Measurement.sums``: one pack, or a chunk of it, with its loss terms, without gradients.

    Plain data; ``live_T`` and ``log_ratio_T`` are computed once, when they are asked for. ``Objective`` makes
    one for each chunk.
    """

    stats: TokenStats
    """Log-probs and entropies under the policy in training, nats."""
    batch: MicroBatch
    """Mask, weights, advantages and versions."""
    terms: LossTerms
    """The loss's per-token terms of the pack."""
    found: Any
    """The result of the loss's search; None for a loss without one."""
    version: int
    """Version of the policy in training: staleness counts from it."""

    @cached_property
    def live_T(self) -> Tensor:
        """bool: the tokens in the loss, whose mask is not 0."""
        return self.batch.mask_T != 0

    @cached_property
    def log_ratio_T(self) -> Tensor:
        """log(pi / pi_old) of each token, nats."""
        return self.stats.log_prob_T - self.batch.old_log_prob_T


@dataclass(frozen=True)
class UpdateSums:
    """Input of ``Measurement.metrics``, as plain data: sums of a whole update, over all packs and ranks."""

    tokens: float
    """Tokens in the loss, at least 1: a divisor."""
    found: Any
    """The result of a search before the update; None if there was none, or the update itself searches."""
    parts: Mapping[str, Tensor]
    """The summed vector of each measurement, and of the search under ``SEARCH``."""


@dataclass(frozen=True)
class Measurement:
    """A measurement, as two functions: sums of one pack, and metrics from their total over packs and ranks.

    ``sums`` is called in every chunk of every pack, and should not make the host wait for a GPU.
    """

    name: str
    """Unique among the measurements of an objective."""
    size: int
    """Length of its vector."""
    sums: Callable[[PackView], Tensor]
    """The vector [size] of one pack, additive over packs and ranks; masked tokens must count nowhere."""
    metrics: Callable[[Tensor, UpdateSums], Metrics]
    """Metrics under the names of the log, from the vector summed over the update; None where one does not
    exist, as a share of no tokens."""


SEARCH = "search"
"""Name of the sums of a loss's search in ``UpdateSums.parts``."""


def share(part: float, whole: float) -> float | None:
    """The metric ``part / whole``; None where the whole is 0."""
    return part / whole if whole else None


def token_mean(name: str, values: Callable[[PackView], Tensor]) -> Measurement:
    """Measurement of a token mean: the metric ``name`` is the mean of ``values`` over the tokens in the loss.

    ``values`` gives one value for each token of a pack, [T]; masked ones are left out here. Or it gives [K]
    values of the tokens in the loss alone, which makes the host wait on a GPU.
    """

    def sums(view: PackView) -> Tensor:
        value = values(view)
        whole = value.shape == view.live_T.shape
        return (live_sum(value, view.live_T) if whole else value.double().sum())[None]

    return Measurement(name, 1, sums, lambda sums, update: {name: float(sums) / update.tokens})


def gate_mean(name: str) -> Measurement:
    """Measurement of a soft gate: the metric ``name`` is the mean of ``g / r``, 1 without a gate."""
    return token_mean(name, lambda view: view.terms.gradient_T / ratio(view.log_ratio_T.double()))
