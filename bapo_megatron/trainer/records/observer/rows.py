"""Tail of metrics.jsonl and evaluations.jsonl: their rows as they are written, merged by step.

Read by an observer's process while the run writes; a line that is not whole yet is left for the next call.
Used by ``following.py`` and ``trackers.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.runtime.jsonl_log import parse_row
from bapo_megatron.runtime.run_files import read_plain
from bapo_megatron.runtime.run_paths import RunPaths

STEP_MARK = "time/step_s"
"""A metric that is a number in every step: a tracker that has it for a step has the step."""

EVALUATION_MARK = "eval/mean"
"""A metric that is a number in every evaluation."""


@dataclass(frozen=True)
class TrackedRow:
    """A row for a tracker, as plain data: the numbers of a step, or of an evaluation of its weights.

    Made by ``TrackedRows``, for ``Tracker.write``.
    """

    step: int
    is_evaluation: bool
    metrics: dict[str, float]


class TrackedRows:
    """Tail of both files of a run, from their first row on; ``new`` gives the rows since its last call.

    Made by ``Observer``.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._steps, self._evaluations = _Tail(paths.metrics), _Tail(paths.evaluations)

    def new(self) -> list[TrackedRow]:
        """The rows since the last call.

        The steps are read first: the evaluations before a step were written before it, so none comes late.
        """
        rows = [*self._steps.rows(False), *self._evaluations.rows(True)]
        return sorted(rows, key=lambda row: (row.step, row.is_evaluation))


class _Tail:
    """Tail of one log, from its first line on; a line that is being written waits until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def rows(self, is_evaluation: bool) -> list[TrackedRow]:
        found = []
        with read_plain(self._path) as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                values = parse_row(line)
                step = values.pop("step")
                numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
                found.append(TrackedRow(step, is_evaluation, numbers))
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
