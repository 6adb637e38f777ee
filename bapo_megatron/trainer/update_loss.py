"""Loss function of each update, and the search of its clipping bounds in the cheapest way possible.

``UpdateLoss.loss`` returns the function that the policy minimizes. The exact search (BAPO's Algorithm 1)
needs the ratio of every token of the update before any backward pass. The ways, from cheap to expensive:

- fixed bounds: no search;
- ``scope: lagged``, inexact: the sums that the previous update measured (the first update measures as below);
- ``scope: micro_batch`` without ``bounds_tokens``, inexact: a search in each micro-batch within the passes;
- on-policy data, with ``algorithm.known_ratio``: the present weights are pi_old, every ratio is 1, no forward
  pass (except GSPO, VESPO, M2PO and P3O, which search over their ratios, if pi_old is the engine's);
- ``batch.hold_forwards``: after all forward passes and before all backward passes;
- otherwise: a forward-only pass over the update.

The other searching losses of ``algorithm.loss`` do the same. With PAPO (``algorithm.polarity``) search and
loss use reweighted advantages, which need entropies, so on-policy data still costs a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.papo import reweighted
from bapo_megatron.algo.papo_schedule import PapoSchedule
from bapo_megatron.algo.terms import build_terms
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.interfaces import Policy
from bapo_megatron.tensor_types import MicroBatch, SearchedLoss, TokenFn
from bapo_megatron.trainer.records.recorder import MOVES
from bapo_megatron.types import Metrics


class UpdateLoss:
    """Factory of each update's loss function: searches its clipping bounds or other parameters.

    One per run and rank. For each update call ``loss`` (collective; may make a forward pass) before the
    optimizer step, and ``metrics`` with the update's sums after it. Keeps the last update's sums for lagged
    bounds, and PAPO's entropy schedule; ``state`` and ``load_state`` are for checkpoints. Raises ConfigError
    for an unknown loss.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        hold_forwards: bool = False,
        sources: Sequence[str] = (),
        keeps_keys: bool = False,
    ) -> None:
        """``sources``: the run's sources, for metrics by source. ``keeps_keys``: see ``Objective``."""
        self.objective = Objective(
            build_loss(config),
            sources,
            config.reference_kl,
            config.distillation,
            keeps_keys,
            build_terms(config),
        )
        """Objective of the configured loss: reads an update's vector of sums."""
        self._search = self.objective.loss.search
        measured = self._search is not None and self._search.is_ratio and config.old_log_probs == "rollout"
        self._known_ratio, self._hold = config.known_ratio and not measured, hold_forwards
        self._previous: Tensor | None = None
        self._bounds = asdict(config.bounds)
        """Settings of the candidates in ``_previous``."""
        self.found: Any = None
        """Result of the last update's search (the clipping bounds); None without one or with one per pack."""
        self._papo = PapoSchedule(config.polarity) if config.polarity.enabled else None

    def loss(self, policy: Policy, packs: Sequence[MicroBatch], on_policy: bool) -> TokenFn | SearchedLoss:
        """Return the loss of an update on ``packs``; ``found`` is set if the search precedes the passes.
        ``on_policy``: on all ranks the present weights are pi_old, the ratio's denominator, for every token
        of the update: they sampled it, or the trainer computed pi_old with them. Collective."""
        search, self.found = self._search, None

        def make(found: object) -> TokenFn:
            return self._weighted(self.objective.token_fn(found, policy.version))

        def make_and_keep(sums: Tensor) -> TokenFn:
            assert search is not None
            self.found = search.find(sums)
            return make(self.found)

        if search is None:
            return make(None)
        measure = self._weighted(search.measure)
        if search.known is not None:  # in any scope, fixed bounds need no sums
            self.found = search.known
            return make(search.known)
        if search.scope == "micro_batch":
            return SearchedLoss(measure, lambda sums: make(search.find(sums)), "micro_batch")
        if search.scope == "lagged" and self._previous is not None:
            sums = self._previous
        elif on_policy and self._known_ratio and self._papo is None:
            sums = policy.old_sums(packs, measure)
        elif self._hold:
            return SearchedLoss(measure, make_and_keep, "update")
        else:
            sums = policy.token_sums(packs, measure)
        return make_and_keep(sums)

    def metrics(self, sums: Tensor, on_policy: bool) -> Metrics:
        """Return the metrics of an update from its reduced vector ``sums``, and ``observe`` it: call once.
        ``on_policy`` as in ``loss``: all ratios are then 1, no bound acts, and ``MOVES`` are None."""
        used = self.observe(sums)
        measured = self.objective.metrics(sums, self.found)
        return {**measured, **(dict.fromkeys(MOVES & measured.keys()) if on_policy else {}), **used}

    def observe(self, sums: Tensor) -> Metrics:
        """Store what the next search and PAPO need of an update's reduced vector; called by ``metrics``.
        Return PAPO's metrics of the update, phase and weights; empty without PAPO."""
        if self._search and self._search.scope == "lagged":
            self._previous = self.objective.search_sums(sums)
        if self._papo is None:
            return {}
        used: Metrics = {"polarity/phase": self._papo.phase}
        for branch, weight in self._papo.weights._asdict().items():
            used[f"polarity/{branch}_weight"] = weight
        self._papo.observe(self.objective.mean_entropy(sums))
        return used

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, as JSON values; None if there is none."""
        state: dict[str, Any] = {}
        if self._previous is not None:
            state |= {"lagged": self._previous.tolist(), "lagged_bounds": self._bounds}
        if self._papo is not None:
            state["polarity"] = self._papo.state()
        return state or None

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore ``state``. Sums for other ``algorithm.bounds`` (``allow_change``) are dropped: the next
        update measures its own."""
        known = state or {}
        then = known.get("lagged_bounds", self._bounds)
        same = all(then.get(name) == value for name, value in self._bounds.items())
        lagged = known.get("lagged") if same and self._search else None
        # Earlier versions append sums of other metrics and have removed fields.
        size = self._search.size if self._search else 0
        self._previous = None if lagged is None else torch.tensor(lagged[:size], dtype=torch.float64)
        if self._papo is not None:
            self._papo.load_state(known.get("polarity"))

    def _weighted(self, fn: TokenFn) -> TokenFn:
        """Return ``fn`` on the trained advantages, which PAPO reweights."""
        return fn if self._papo is None else reweighted(fn, self._papo.weights)
