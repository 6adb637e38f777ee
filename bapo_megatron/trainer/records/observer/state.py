"""State file of an observer, RUN/trackers/NAME.json: the steps that its tracker has, and its last problem.

Only the observer writes it, atomically; the run reads it. A file that cannot be read counts as none. Used
in this folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_files import read_plain

_MOST_BYTES = 1 << 20

NOTHING = -1
"""The step before the first: evaluations begin with step 0."""


@dataclass(frozen=True)
class TrackerState:
    """Progress of one tracker, and its last problem: the content of its state file. Plain data.

    Written by ``Observer``, which reads it at its start; ``Observers`` reads it while the run goes on.
    """

    step: int = NOTHING
    """Last step whose metrics the tracker has."""
    evaluation: int = NOTHING
    """Last step whose evaluation the tracker has."""
    problem: str | None = None
    """Error of the last attempt; None after a success."""
    attempts: int = 0
    """Number of failed attempts."""
    kept: int | None = None
    """Last step that the tracker has from before this start, though the run makes it again."""
    project: str | None = None
    """Project of the tracked run. None in states of earlier versions, and stays so there."""

    @property
    def is_of_earlier_version(self) -> bool:
        """Whether an earlier version began the tracked run."""
        return self.project is None and max(self.step, self.evaluation) > NOTHING


def read_state(path: Path) -> TrackerState:
    """The state in ``path``; an initial one if there is none, or none that can be read."""
    try:
        with read_plain(path) as file:
            return TrackerState(**json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError, TypeError):
        return TrackerState()


def write_state(path: Path, state: TrackerState) -> None:
    """Write ``state`` to ``path``, whose folder exists."""
    write_atomically(path, json.dumps(asdict(state)) + "\n")
