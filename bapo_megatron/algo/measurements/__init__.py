"""Measurements of an update: named, additive sums over its tokens, and the metrics that follow from them.

A new metric is one entry: write a ``Measurement`` (or a ``token_mean``) and add it to ``MEASUREMENTS`` in
``algo/objective.py``, or to the ``measurements`` of a loss.

Legend: ``_T`` tokens of a pack, ``_K`` those of them that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from bapo_megatron.algo.tokens import live_sum, ratio
from bapo_megatron.types import Metrics, MicroBatch, TokenStats


class LossTerms(NamedTuple):
    """The loss of one pack, and what it does to each of its tokens."""

    loss: Tensor
    """float64 scalar, differentiable in ``stats.log_prob_T``: the sum over the pack's tokens, each with its
    ``weight_T``. The optimizer step divides it by the update's count of tokens."""
    gradient_T: Tensor
    """The factor ``g`` of each token's gradient, ``d loss / d log pi = -weight A g``; 0 where the token has
    no gradient. PPO's: the ratio, or 0 where it is clipped."""
    clipped_T: Tensor
    """bool: the tokens that the loss clips, for the clip fractions."""


@dataclass(frozen=True)
class PackView:
    """The tokens of one pack as measurements see them. Nothing here is differentiated."""

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
        """bool: the tokens that count."""
        return self.batch.mask_T != 0

    @cached_property
    def log_ratio_T(self) -> Tensor:
        """log(pi / pi_old) of each token, nats."""
        return self.stats.log_prob_T - self.batch.old_log_prob_T


@dataclass(frozen=True)
class UpdateSums:
    """The sums of a whole update on all ranks, by the names of their measurements."""

    tokens: float
    """Tokens that count; 1 where there are none, so that it can be divided by."""
    found: Any
    """The result of a search before the update; None if there was none, or the update itself searches."""
    parts: Mapping[str, Tensor]
    """The summed vector of each measurement, and of the search under ``SEARCH``."""


@dataclass(frozen=True)
class Measurement:
    """A named quantity of an update: additive sums of one pack, and metrics of the sums over all packs."""

    name: str
    """Tells it from the others."""
    size: int
    """Length of its vector."""
    sums: Callable[[PackView], Tensor]
    """The vector [size] of one pack, additive over packs and ranks; masked tokens must count nowhere."""
    metrics: Callable[[Tensor, UpdateSums], Metrics]
    """Metrics under the names of the log, from the vector summed over the update; None where one does not
    exist, as a share of no tokens."""


SEARCH = "search"
"""Name of the sums of a loss's search in ``UpdateSums.parts``."""


def token_mean(name: str, values: Callable[[PackView], Tensor]) -> Measurement:
    """The metric ``name``: the mean of ``values`` over the tokens of an update that count.

    ``values`` gives one value for each token of a pack, [T], of which those that do not count are left out
    here; or, which makes the host wait on a GPU, [K] values of the tokens that count alone.
    """

    def sums(view: PackView) -> Tensor:
        value = values(view)
        whole = value.shape == view.live_T.shape
        return (live_sum(value, view.live_T) if whole else value.double().sum())[None]

    return Measurement(name, 1, sums, lambda sums, update: {name: float(sums) / update.tokens})


def gate_mean(name: str) -> Measurement:
    """The metric ``name`` of a loss with a soft gate: the mean of ``g / r``; without a gate ``g`` is r."""
    return token_mean(name, lambda view: view.terms.gradient_T / ratio(view.log_ratio_T.double()))
