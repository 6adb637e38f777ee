"""The choice of an update's loss: where its clipping bounds come from, and what finding them costs.

The exact search needs the ratio of every token of the update before any backward pass. In order of price:

- fixed bounds need no search;
- a ratio that is known needs no forward pass: the present weights are pi_old of every token;
- ``scope: lagged`` takes the sums that the previous update measured on its way;
- ``scope: micro_batch`` searches in the packs in hand, as the published code does;
- ``batch.hold_forwards`` searches after all forward passes and before all backward passes;
- else a forward-only pass over the update comes first.

Another ``algorithm.loss`` goes the same ways with what it searches, if it searches anything. With PAPO the
search and the loss see the reweighted advantages. Those follow from entropies, which only a pass of the model
knows, so a known ratio saves no pass then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.papo import reweighted
from bapo_megatron.algo.papo_schedule import PapoSchedule
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.interfaces import Policy
from bapo_megatron.types import Metrics, MicroBatch, SearchedLoss, TokenFn


class Clipping:
    """The loss of each update, with the clipping bounds (or what else ``algorithm.loss`` searches) in it.

    Between updates it keeps the sums of the last one for lagged bounds, the entropy's trajectory for PAPO.
    ConfigError if the loss cannot be had.
    """

    def __init__(self, config: AlgorithmConfig, hold_forwards: bool = False) -> None:
        self.objective = Objective(build_loss(config))
        """The objective of the configured loss: reads the vector of sums of an update."""
        self._search = self.objective.loss.search
        self._known_ratio, self._hold = config.known_ratio, hold_forwards
        self._previous: Tensor | None = None
        self._papo = PapoSchedule(config.polarity) if config.polarity.enabled else None

    def loss(
        self, policy: Policy, packs: Sequence[MicroBatch], on_policy: bool
    ) -> tuple[TokenFn | SearchedLoss, Any]:
        """The loss of an update on ``packs``, and what its search found, if that is known before it.

        ``on_policy``: on all ranks the present weights are pi_old, the ratio's denominator, of every token of
        the update: they sampled it, or the trainer computed pi_old with them.
        """
        search = self._search

        def make(found: object) -> TokenFn:
            return self._weighted(self.objective.token_fn(found, policy.version))

        if search is None:
            return make(None), None
        measure = self._weighted(search.measure)
        if search.scope == "micro_batch":
            return SearchedLoss(measure, lambda sums: make(search.find(sums)), "micro_batch"), None
        if search.known is not None:
            return make(search.known), search.known
        if search.scope == "lagged" and self._previous is not None:
            sums = self._previous
        elif on_policy and self._known_ratio and self._papo is None:
            sums = policy.old_sums(packs, measure)
        elif self._hold:
            return SearchedLoss(measure, lambda sums: make(search.find(sums)), "update"), None
        else:
            sums = policy.token_sums(packs, measure)
        found = search.find(sums)
        return make(found), found

    def observe(self, sums: Tensor) -> Metrics:
        """Keep what the next update needs of ``sums``, the vector of an update at the weights before it.

        Returns the phase and the weights of PAPO that the update used; nothing where it is off.
        """
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
        """The state that a continued run needs; plain JSON."""
        state: dict[str, Any] = {}
        if self._previous is not None:
            state["lagged"] = self._previous.tolist()
        if self._papo is not None:
            state["polarity"] = self._papo.state()
        return state or None

    def load_state(self, state: dict[str, Any] | list[float] | None) -> None:
        """Restore ``state``; a list, from earlier versions, is that of lagged bounds."""
        known: dict[str, Any] = {"lagged": state} if isinstance(state, list) else state or {}
        lagged = known.get("lagged")
        self._previous = None if lagged is None else torch.tensor(lagged, dtype=torch.float64)
        if self._papo is not None:
            self._papo.load_state(known.get("polarity"))

    def _weighted(self, fn: TokenFn) -> TokenFn:
        """``fn`` with the advantages that the update trains on: reweighted under PAPO."""
        return fn if self._papo is None else reweighted(fn, self._papo.weights)
