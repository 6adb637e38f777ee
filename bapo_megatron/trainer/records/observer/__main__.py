"""Entry point of an observer process, which ``processes.py`` starts for each tracker.

    python -m bapo_megatron.trainer.records.observer RUN NAME STEP LIFELINE

RUN: the run directory; STEP: the last step on disk; LIFELINE: a pipe that closes when the run is gone.
It ignores the signals that reach all processes of a job: the run ends it, after the last rows or a limit.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast

from bapo_megatron.runtime.processes import die_with_parent
from bapo_megatron.trainer.records.observer.following import Inbox, Observer
from bapo_megatron.trainer.records.observer.trackers import (
    MlflowTracker,
    RedactingStream,
    TrackedRun,
    Tracker,
    TrackioTracker,
    WandbTracker,
)

_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(root: str, name: str, resume_step: str, lifeline: str) -> int:
    """Exit code 0 if the tracker has every row, 1 if it lacks the last ones."""
    die_with_parent(int(lifeline))
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    os.nice(10)
    sys.stdout, sys.stderr = (cast("TextIO", RedactingStream(stream)) for stream in (sys.stdout, sys.stderr))
    observer = Observer(Path(root), name, int(resume_step), _TRACKERS[name], Inbox(sys.stdin.fileno()))
    return 0 if observer.observe() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
