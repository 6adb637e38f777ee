"""What an observer says of itself: RUN/trackers/NAME.json, which it alone writes and the run reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_files import read_plain

_MOST_BYTES = 1 << 20

NOTHING = -1
"""The step before all others: evaluations begin with step 0."""


@dataclass(frozen=True)
class TrackerState:
    """How far a tracker is, and what is wrong with it."""

    step: int = NOTHING
    """Last step whose metrics it was given."""
    evaluation: int = NOTHING
    """Last step whose evaluation it was given."""
    problem: str | None = None
    """Why the last attempt failed."""
    attempts: int = 0
    """Attempts that failed."""
    kept: int | None = None
    """Last of the steps that it had from before, and that the run has made again since this start."""


def read_state(path: Path) -> TrackerState:
    """The state in ``path``; that of a beginning if there is none, or none that can be read."""
    try:
        with read_plain(path) as file:
            return TrackerState(**json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError, TypeError):
        return TrackerState()


def write_state(path: Path, state: TrackerState) -> None:
    """Write ``state`` to ``path``, whose folder exists."""
    write_atomically(path, json.dumps(asdict(state)) + "\n")
