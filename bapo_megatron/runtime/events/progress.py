"""The signs that a run makes progress, as its directory shows them to another process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bapo_megatron.runtime.jsonl_log import tail_rows
from bapo_megatron.runtime.run_paths import RunPaths

_LEAST_S, _UNKNOWN_S = 600.0, 3600.0
_TIMES_LONGER = 3.0
_STEPS = 10


@dataclass(frozen=True)
class Progress:
    """What a run has written last, and how long it may well be silent."""

    at: float
    """The last sign of life, in seconds since 1970; 0 for none."""
    limit_s: float
    """A longer silence is a stall: three times the longest of the last ten steps, at least ten minutes. An
    hour where there is no step yet: the first one loads and compiles."""
    step: int
    """The last step with metrics."""


def read_progress(run: Path) -> Progress:
    """The progress of ``run``. Signs are steps, updates, evaluations, checkpoints, and what the sampler
    writes."""
    paths = RunPaths(run)
    logs = sorted(paths.journal.glob("segments-*.log"))[-1:]  # it grows, and does not touch its folder
    signs = [paths.metrics, paths.updates, paths.evaluations, *logs]
    signs += [paths.journal, paths.evaluation, paths.checkpoints, paths.step_exports]
    rows = list(islice(tail_rows(paths.metrics), _STEPS))
    times = [float(seconds) for row in rows if isinstance(seconds := row.get("time/step_s"), (int, float))]
    step = rows[0].get("step") if rows else 0
    return Progress(
        max(map(_time, signs)),
        max(_LEAST_S, _TIMES_LONGER * max(times)) if times else _UNKNOWN_S,
        step if isinstance(step, int) else 0,
    )


def is_stalled(progress: Progress, begun: float, limit_s: float | None, now: float | None = None) -> bool:
    """Whether a run that began to work at ``begun`` has been silent for too long. ``limit_s``: None for the
    limit that its steps suggest."""
    now = time.time() if now is None else now
    limit_s = progress.limit_s if limit_s is None else limit_s
    return now - max(progress.at, begun) > limit_s


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
