"""Weights to an engine that lives in rank 0's process: handed over tensor by tensor."""

from __future__ import annotations

from bapo_megatron.interfaces import Engine, Policy


class InProcessSync:
    """Implements ``interfaces.WeightSync``. ``engine`` is None on every rank but 0."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine

    def push(self, policy: Policy) -> None:
        """Gather the weights on all ranks and load them into rank 0's engine."""
        weights = policy.hf_weights()
        if self._engine is not None:
            self._engine.update_weights(weights, policy.version)
        for _ in weights:  # the other ranks take part in the gathering
            pass
