"""Stall detection: whether a run makes progress, from the modification times of its files.

Only reads the run directory: called by the event sender, and by `bapo status` in another process. Used by
``commands/cluster/status.py`` and ``sender.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bapo_megatron.runtime.jsonl_log import tail_rows
from bapo_megatron.runtime.run_paths import RunPaths

_LEAST_S, _UNKNOWN_S = 600.0, 3600.0
_TIMES_LONGER = 3.0
_STEPS = 10


@dataclass(frozen=True)
class Patience:
    """Stall limit of a run, as plain data from its configuration: the longest silence that is no stall."""

    steps: int
    """Steps of the whole run. After the last one there is no limit."""
    evaluate_every: int
    """Steps between evaluations; 0 for none. One may take an hour."""
    stalled_minutes: float | None
    """The limit. None: three times the longest of the last ten steps, and at least ten minutes; an hour
    before the first step, which loads and compiles."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as plain data: its last sign of life, in seconds since 1970, and its step times."""

    at: float
    step: int
    longest_step_s: float | None

    def silent_s(self, begun: float, now: float) -> float:
        """Seconds since the last sign of life, or the start at ``begun``; all by the clock of the files."""
        return now - max(self.at, begun)

    def is_stalled(self, patience: Patience, begun: float, now: float) -> bool:
        """Whether the run has been silent for longer than its limit."""
        return self.step < patience.steps and self.silent_s(begun, now) > self._limit_s(patience)

    def _limit_s(self, patience: Patience) -> float:
        if patience.stalled_minutes is not None:
            return 60 * patience.stalled_minutes
        if self.longest_step_s is None:
            return _UNKNOWN_S
        limit_s = max(_LEAST_S, _TIMES_LONGER * self.longest_step_s)
        evaluates = patience.evaluate_every > 0 and self.step % patience.evaluate_every == 0
        return max(limit_s, _UNKNOWN_S) if evaluates else limit_s


def read_progress(run: Path) -> Progress:
    """The progress of the run in the directory ``run``, now.

    Signs of life are writes of steps, updates, evaluations, checkpoints, exports and the sampler's journal.
    """
    paths = RunPaths(run)
    logs = sorted(paths.journal.glob("segments-*.log"))[-1:]  # a growing file does not touch its folder
    signs = [paths.metrics, paths.updates, paths.evaluations, *logs]
    signs += [paths.journal, paths.evaluation, paths.checkpoints, paths.step_exports]
    rows = list(islice(tail_rows(paths.metrics), _STEPS))
    times = [float(seconds) for row in rows if isinstance(seconds := row.get("time/step_s"), (int, float))]
    step = rows[0].get("step") if rows else 0
    return Progress(max(map(_time, signs)), step if isinstance(step, int) else 0, max(times, default=None))


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
