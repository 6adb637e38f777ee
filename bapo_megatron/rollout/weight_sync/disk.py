"""Weights to the engines through a folder that trainer and engines both see."""

from __future__ import annotations

from bapo_megatron.interfaces import Policy, Sampler
from bapo_megatron.rollout.weight_sync.staging import WeightStaging
from bapo_megatron.runtime.distributed import share


class DiskSync:
    """Implements ``interfaces.WeightSync``. On every rank but 0, ``sampler`` and ``staging`` are None."""

    def __init__(self, sampler: Sampler | None, staging: WeightStaging | None) -> None:
        """Collective. In a replay nothing is sampled: ``staging`` is None on rank 0 too."""
        self._sampler, self._staging = sampler, staging
        self._is_needed = share(staging is not None)

    def push(self, policy: Policy, step: int) -> None:
        """Gather the weights within rank 0's replica, write them, and have the engines load them."""
        if not self._is_needed or policy.data_rank != 0:
            return
        weights = policy.hf_weights()
        if self._sampler is not None and self._staging is not None:
            folder = self._staging.write(weights, policy.version)
            self._sampler.load_weights(folder, policy.version, step)
            self._staging.keep_only(folder)
        for _ in weights:  # the other ranks take part in the gathering
            pass
