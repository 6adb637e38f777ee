"""The records that the book is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo_megatron.rollout.sampler.state import ARRAYS, DTYPES, OpenGroup
from bapo_megatron.rollout.sampler.write_ahead_log import Record
from bapo_megatron.types import FinishReason, Generation


def opened(groups: Sequence[tuple[int, int, int]], taken: int | None) -> Record:
    """Groups begin: (number, epoch, index of the prompt).

    ``taken``: places of the dataset used so far; None if these places were used before.
    """
    return Record("open", {"groups": [list(group) for group in groups], "taken": taken}, {})


@dataclass(frozen=True)
class Part:
    """A segment that an engine returned, and where it belongs."""

    group: OpenGroup
    sample: int
    start: int
    """Tokens of the response before it."""
    generation: Generation
    finish_reason: FinishReason | None
    """Of the response, if it ends with this segment."""


def segments(parts: Sequence[Part]) -> Record:
    """Segments that arrived together: all of them are in the journal, or none."""
    rows: list[list[Any]] = []
    for part in parts:
        group, length = part.group, len(part.generation.token_ids_R)
        place = [group.number, group.epoch, group.index, part.sample]
        rows.append([*place, part.start, length, part.finish_reason])
    found = [part.generation for part in parts]
    columns = [[g.token_ids_R for g in found], [g.log_probs_R for g in found], [g.versions_R for g in found]]
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *column]).astype(dtype)
        for name, dtype, column in zip(ARRAYS, DTYPES, columns, strict=True)
    }
    return Record("segments", {"parts": rows}, arrays)


def judged(number: int, rewards: Sequence[float], failures: Sequence[str]) -> Record:
    """A whole group has its rewards. ``failures``: kinds of those that could not be judged."""
    return Record("judged", {"number": number, "rewards": list(rewards), "failures": list(failures)}, {})


def dropped(number: int, reason: str) -> Record:
    """A group will not be trained on."""
    return Record("dropped", {"number": number, "reason": reason}, {})


def batched(step: int, numbers: Sequence[int]) -> Record:
    """The groups of ``step``, whose file is on disk."""
    return Record("batch", {"step": step, "groups": list(numbers)}, {})


def rewound(step: int) -> Record:
    """The files of the steps after ``step`` are gone: they will be sampled anew."""
    return Record("rewind", {"step": step}, {})


def weights_came(version: int, step: int) -> Record:
    """Engines sample from the weights ``version`` now, which the updates of ``step`` have made."""
    return Record("weights", {"version": version, "step": step}, {})
