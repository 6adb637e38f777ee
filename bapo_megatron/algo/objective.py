"""Objective of an update: one additive vector ``[loss, tokens, sums of measurements, sums of the search]``.

``Objective.token_fn`` returns the function that computes the vector of a pack or chunk, without a host wait
for a GPU. The policy minimizes its element 0 and sums the vectors over packs and ranks with one reduction;
``Objective.metrics`` maps the sum to metrics. Legend: ``_T`` tokens of a pack (a micro-batch of packed
sequences).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bapo_megatron.algo.diagnostics import DIAGNOSTICS, by_source
from bapo_megatron.algo.losses import Loss
from bapo_megatron.algo.measurements import (
    CLIPPING,
    EFFECTIVE_SAMPLE_SIZE,
    ENGINE_GAP,
    ENGINE_GAP_OF_OWN_KEYS,
    SEARCH,
    Measurement,
    PackView,
    UpdateSums,
    token_mean,
)
from bapo_megatron.algo.reference_kl import kl_measurement
from bapo_megatron.algo.reference_kl_config import DistillationConfig, ReferenceKlConfig
from bapo_megatron.algo.terms import Term, kl_terms, term_measurement
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats
from bapo_megatron.types import Metrics


def _kl_T(view: PackView) -> Tensor:
    """k3 estimate of KL(rollout || policy) per token, [T]: ``q - 1 - log q``, ``q = pi / pi_rollout``."""
    log_q_T = (view.stats.log_prob_T - view.batch.rollout_log_prob_T).double()
    return log_q_T.exp() - 1 - log_q_T


ENTROPY = token_mean("policy/entropy", lambda view: view.stats.entropy_T)
KL = token_mean("policy/kl", _kl_T)
RATIO_GAP = token_mean("policy/ratio_gap", lambda view: view.log_ratio_T.double().abs())

MEASUREMENTS = (
    *(ENTROPY, KL, RATIO_GAP, EFFECTIVE_SAMPLE_SIZE),
    *(CLIPPING, ENGINE_GAP, DIAGNOSTICS),
)
"""Measurements of every update, for any loss."""


class Objective:
    """Objective of an update, built from a loss, its added terms and all measurements.

    ``token_fn`` returns the function of a pack's vector of sums. The policy calls it for each chunk of a
    pack, minimizes element 0 (divided by the number of trained tokens), and sums the vectors over packs and
    ranks; ``metrics``, ``search_sums`` and ``mean_entropy`` read that sum. Holds no state between updates and
    makes no collective calls. The constructor raises ValueError if two measurements share a name; a pack's
    function raises it if a measurement returns a vector of the wrong length.
    """

    def __init__(
        self,
        loss: Loss,
        sources: Sequence[str] = (),
        reference: ReferenceKlConfig | None = None,
        distillation: DistillationConfig | None = None,
        keeps_keys: bool = False,
        terms: Mapping[str, Term] | None = None,
    ) -> None:
        """``sources``: names of the run's sources, each with its own metrics; empty for a single file.
        ``reference``: KL penalty to a reference policy, a loss term or only a metric. ``distillation``: KL to
        a teacher, a loss term. ``keeps_keys``: whether engines keep keys and values of older weights
        (``on_update=in_place``). ``terms``: those of ``algorithm.terms``."""
        self.loss = loss
        terms = terms or {}
        self._terms = [*kl_terms(reference, distillation), *terms.values()]
        first = MEASUREMENTS.index(CLIPPING) + 1
        always = [
            ENGINE_GAP_OF_OWN_KEYS if keeps_keys and measurement is ENGINE_GAP else measurement
            for measurement in MEASUREMENTS
        ]
        self._measurements: list[Measurement] = [
            *always[:first],
            *loss.measurements,  # a loss's metrics follow its clip fractions
            *always[first:],
            *(kl_measurement(config) for config in (reference, distillation) if config and config.enabled),
            *(term_measurement(label, term) for label, term in terms.items()),
            *([by_source(sources)] if sources else []),
        ]
        self._parts: dict[str, slice] = {}
        self._width = 2
        for measurement in self._measurements:
            if measurement.name in (SEARCH, *self._parts):
                raise ValueError(f"two measurements have the name {measurement.name!r}: rename one")
            self._parts[measurement.name] = slice(self._width, self._width + measurement.size)
            self._width += measurement.size
        self._parts[SEARCH] = slice(self._width, None)

    def token_fn(self, found: object, version: int) -> TokenFn:
        """Return a token function (``TokenFn``) of a pack's vector; element 0, the loss, has gradients.
        ``found``: the result of the loss's search. ``version``: of the policy in training."""
        search = self.loss.search

        def sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
            # To a policy loss the entropy is a constant; terms differentiate it.
            terms = self.loss.terms(stats._replace(entropy_T=stats.entropy_T.detach()), batch, found)
            loss = terms.loss
            for term in self._terms:
                loss = loss + term(stats, batch)
            with torch.no_grad():
                view = PackView(stats, batch, terms, found, version)
                parts = [view.live_T.sum().double()[None]]
                parts += [_checked_sums(measurement, view) for measurement in self._measurements]
                if search:
                    parts.append(search.measure(stats, batch))
            return torch.cat([loss[None], *parts])

        return sums

    def metrics(self, sums: Tensor, found: object) -> Metrics:
        """Metrics of an update from the reduced vector, in measurement order. ``found`` as in ``token_fn``;
        None if each micro-batch had its own search."""
        parts = {name: sums[place] for name, place in self._parts.items()}
        update = UpdateSums(max(float(sums[1]), 1.0), found, parts)
        metrics: Metrics = {"policy/loss": float(sums[0]) / update.tokens, "policy/tokens": float(sums[1])}
        for measurement in self._measurements:
            metrics |= measurement.metrics(parts[measurement.name], update)
        return metrics

    def search_sums(self, sums: Tensor) -> Tensor:
        """The loss's search sums in the (reduced) vector, at the weights before the update."""
        return sums[self._parts[SEARCH]]

    def mean_entropy(self, sums: Tensor) -> float:
        """Mean entropy in nats per token, from the (reduced) vector; 0 without tokens."""
        return float(sums[self._parts[ENTROPY.name]]) / max(float(sums[1]), 1.0)


def _checked_sums(measurement: Measurement, view: PackView) -> Tensor:
    """Return a measurement's sums for one pack; raise ValueError unless there are ``size`` of them."""
    sums = measurement.sums(view)
    if sums.shape != (measurement.size,):
        raise ValueError(f"measurement {measurement.name}: sums {list(sums.shape)}, size={measurement.size}")
    return sums
