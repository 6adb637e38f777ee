"""A weight folder written by a single process, without the ranks of ``DiskSync``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from bapo_megatron.rollout.weight_sync.disk import WeightStaging


class SingleWriter(WeightStaging):
    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """Write all weights and return their folder."""
        self.prepare(version)
        try:
            self.publish(version, self.write_share(weights, version, 0, 1))
        finally:
            self.discard(version)
        return self.folder(version)
