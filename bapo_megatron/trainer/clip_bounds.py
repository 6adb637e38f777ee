"""Where the clipping bounds of an update come from, and what finding them costs.

The exact search needs the ratio of every token of the update before any backward pass. In order of price:

- fixed bounds need no search;
- a ratio that is known needs no forward pass: the present weights are pi_old of every token;
- ``scope: lagged`` takes the sums that the previous update measured on its way;
- ``scope: micro_batch`` searches in the packs in hand, as the published code does;
- ``batch.hold_forwards`` searches after all forward passes and before all backward passes;
- else a forward-only pass over the update comes first.

With ``polarity`` the search and the loss see the reweighted advantages. Those follow from entropies, which
only a pass of the model knows, so a known ratio saves no pass then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algo.bapo import sum_count
from bapo_megatron.algo.objective import Found, contribution_fn, loss_fn, mean_entropy, measured, search
from bapo_megatron.algo.papo import reweighted
from bapo_megatron.algo.papo_schedule import PapoSchedule
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.interfaces import Policy
from bapo_megatron.types import Metrics, MicroBatch, SearchedLoss, TokenFn


class Clipping:
    """Chooses the loss of each update.

    Between updates it keeps the sums of the last one for lagged bounds, the entropy's trajectory for PAPO.
    """

    def __init__(self, config: AlgorithmConfig, hold_forwards: bool = False) -> None:
        self._bounds, self._known_ratio, self._hold = config.bounds, config.known_ratio, hold_forwards
        self._previous: Tensor | None = None
        self._polarity = PapoSchedule(config.polarity) if config.polarity.enabled else None

    def loss(
        self, policy: Policy, packs: Sequence[MicroBatch], on_policy: bool
    ) -> tuple[TokenFn | SearchedLoss, Found | None]:
        """The loss of an update on ``packs``, with the bounds if they are known before it.

        ``on_policy``: on all ranks the present weights are pi_old, the ratio's denominator, of every token of
        the update: they sampled it, or the trainer computed pi_old with them.
        """
        config = self._bounds
        measure = self._weighted(contribution_fn(config))

        def make(found: Found) -> TokenFn:
            return self._weighted(loss_fn(found, config, policy.version))

        if config.scope == "micro_batch":
            return SearchedLoss(measure, lambda sums: make(search(sums, config)), "micro_batch"), None
        if sum_count(config) == 2:
            sums = torch.zeros(4 * 2, dtype=torch.float64)  # any will do
        elif config.scope == "lagged" and self._previous is not None:
            sums = self._previous
        elif on_policy and self._known_ratio and self._polarity is None:
            sums = policy.old_sums(packs, measure)
        elif self._hold:
            return SearchedLoss(measure, lambda sums: make(search(sums, config)), "update"), None
        else:
            sums = policy.token_sums(packs, measure)
        found = search(sums, config)
        return make(found), found

    def observe(self, sums: Tensor) -> Metrics:
        """Take note of what an update's loss measured, at the weights before it.

        Returns the phase and the weights of PAPO that the update used; nothing where it is off.
        """
        if self._bounds.scope == "lagged":
            self._previous = measured(sums)
        control = self._polarity
        if control is None:
            return {}
        used: Metrics = {"polarity/phase": control.phase}
        used |= {f"polarity/{branch}_weight": weight for branch, weight in control.weights._asdict().items()}
        control.observe(mean_entropy(sums))
        return used

    def state(self) -> dict[str, Any] | None:
        """What a continuation needs to know; plain JSON."""
        state: dict[str, Any] = {}
        if self._previous is not None:
            state["lagged"] = self._previous.tolist()
        if self._polarity is not None:
            state["polarity"] = self._polarity.state()
        return state or None

    def load_state(self, state: dict[str, Any] | list[float] | None) -> None:
        """Go on after ``state``; a list, from earlier versions, is that of lagged bounds."""
        known: dict[str, Any] = {"lagged": state} if isinstance(state, list) else state or {}
        lagged = known.get("lagged")
        self._previous = None if lagged is None else torch.tensor(lagged, dtype=torch.float64)
        if self._polarity is not None:
            self._polarity.load_state(known.get("polarity"))

    def _weighted(self, fn: TokenFn) -> TokenFn:
        """``fn`` of the advantages that the update trains on."""
        return fn if self._polarity is None else reweighted(fn, self._polarity.weights)
