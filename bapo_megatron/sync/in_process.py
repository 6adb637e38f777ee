"""Weights to an engine that lives in rank 0's process: handed over tensor by tensor."""

from __future__ import annotations

from bapo_megatron.distributed import share
from bapo_megatron.interfaces import Engine, Policy


class InProcessSync:
    """Implements ``interfaces.WeightSync``. ``engine`` is None on every rank but 0, and on 0 in a replay."""

    def __init__(self, engine: Engine | None) -> None:
        """Collective: every rank learns whether there is an engine at all."""
        self._engine = engine
        self._is_needed = share(engine is not None)

    def push(self, policy: Policy) -> None:
        """Gather the weights within rank 0's replica and load them into its engine."""
        if not self._is_needed or policy.data_rank != 0:
            return
        weights = policy.hf_weights()
        if self._engine is not None:
            self._engine.update_weights(weights, policy.version)
        for _ in weights:  # the other ranks take part in the gathering
            pass
