"""A step's batch in memory, in place of one whose columns are read from the step's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.algo.advantages import Advantage
from bapo_megatron.data import samples
from bapo_megatron.rollout.sampler.step_columns import StepColumns, header_of
from bapo_megatron.types import ColumnFile, Group, ResponseTokens, StepBatch, StepHeader

NO_FILE = ColumnFile(Path("none"), 0, "", {})


class MemoryBatch:
    """The ``StepColumns`` of a step with all columns at hand."""

    def __init__(self, batch: StepBatch) -> None:
        self.batch, self.header = batch, header_in_memory(batch)

    def read(self, group: int, response: int) -> tuple[np.ndarray, ResponseTokens]:
        found = self.batch.groups[group]
        return found.prompt.token_ids_P, found.rollouts[response]


def in_memory(*groups: Group) -> MemoryBatch:
    """A step of these groups."""
    return MemoryBatch(StepBatch(groups, {}))


def samples_of(
    batch: MemoryBatch | StepColumns, advantage: Advantage, *more: Any, **named: Any
) -> list[list[samples.StoredSample]]:
    """The samples of a step, by group."""
    return samples.samples_of(batch.header, batch.read, advantage, *more, **named)


def header_in_memory(batch: StepBatch) -> StepHeader:
    """The header of a batch that no file has."""
    return header_of(batch, NO_FILE)
