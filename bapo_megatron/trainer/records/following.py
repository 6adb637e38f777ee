"""Tracker process: sends each row of a run's metrics files to one tracker (W&B, ...), in order, with retries.

    python -m bapo_megatron.trainer.records.following RUN NAME RESUME_STEP LIMIT_S

``metrics_log.py``, in the run's rank 0, starts one per tracker NAME, with a log file as standard output and
the run's terminal as standard error. It begins after the tracker's last step or, if unknown, after
RESUME_STEP, the last step in the run's files. A byte on standard input, or the end of rank 0's process, means
that the run has ended: it then has LIMIT_S seconds for the last rows. It ignores a job's signals.
"""

from __future__ import annotations

import heapq
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from bapo_megatron.runtime.event_kinds import ENDS, last_turn
from bapo_megatron.runtime.exit_codes import ignore_signals
from bapo_megatron.runtime.jsonl_log import append_event, parse_row, rows_from_end
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records.trackers import (
    TRACKERS,
    RedactingStream,
    TrackedRun,
    Tracker,
    redacted,
    tracked_run,
)

RETRY_S = 60.0
"""Pause between attempts."""

_POLL_S = 1.0
_PROBLEM_CHARACTERS = 500


class TrackedRow(NamedTuple):
    """Metrics of a step, or of an evaluation of the weights after it, for a tracker; in this order."""

    step: int
    is_evaluation: bool
    metrics: dict[str, float]


class TrackedRows:
    """Reader of a run's metrics and evaluations while it writes them: ``new`` returns the rows since the last
    call, in the order of steps."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._offsets = (paths.metrics, paths.evaluations), [0, 0]

    def new(self) -> Iterator[TrackedRow]:
        """Return the rows since the last call, lazily: a long run has hundreds of megabytes. Notes the end of
        the steps first: evaluations before a step were written before it, so none comes late."""
        ends = [path.stat().st_size for path in self._paths]
        evaluations = [*self._rows(True, ends[True])]
        return heapq.merge(self._rows(False, ends[False]), evaluations)

    def _rows(self, is_evaluation: bool, end: int) -> Iterator[TrackedRow]:
        """Yield the rows of lines that begin before the byte ``end``; a partial line waits."""
        with self._paths[is_evaluation].open("rb") as file:
            file.seek(self._offsets[is_evaluation])
            while self._offsets[is_evaluation] < end and (line := file.readline()).endswith(b"\n"):
                values = parse_row(line)
                step = values.pop("step")
                numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
                self._offsets[is_evaluation] += len(line)
                yield TrackedRow(step, is_evaluation, numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Wait = Callable[[float], bool]
"""Waits the given seconds or until the run has ended; returns whether it has."""


class Follower:
    """Sender of one run's rows to one tracker: ``follow`` returns at the end of the run. Tracker errors are
    never raised: they become an event and a line on ``console``, and ``follow`` tries again after a pause.
    ``resume_step``: the last step in the run's files at its start."""

    def __init__(
        self,
        paths: RunPaths,
        name: str,
        resume_step: int,
        opened: Callable[[TrackedRun], Tracker],
        wait: Wait,
        console: TextIO,
    ) -> None:
        self._paths, self._name, self._opened = paths, name, opened
        self._wait, self._console = wait, console
        self._sent = (resume_step or -1, True)  # step 0 is evaluated before step 1
        self._is_failing = False

    def follow(self) -> bool:
        """Follow the run to its end; return False if the last attempt to send the last rows failed."""
        while True:
            is_last = self._wait(0.0)
            try:
                self._attempt()
                return True
            except Exception as error:  # the package or its server may raise anything
                self._note_failure(error)
            if is_last:
                return False
            self._wait(RETRY_S)

    def _attempt(self) -> None:
        tracker = self._opened(tracked_run(self._paths.root, self._name))
        try:
            self._write_all(tracker)
        except BaseException:
            with suppress(Exception):
                tracker.close(None)
            raise
        tracker.close(self._end())

    def _end(self) -> str:
        """Return how the run ended; the run records its end before it ends these processes."""
        last = last_turn(rows_from_end(self._paths.events))
        return last if last in ENDS else "killed"

    def _write_all(self, tracker: Tracker) -> None:
        last = tracker.last_step()
        if last is not None and last != self._sent[0]:  # its evaluation may be missing
            self._sent = (last, True)
        rows = TrackedRows(self._paths)
        while True:
            is_last = self._wait(0.0)  # before the read, which then has all rows
            for row in rows.new():
                if row[:2] <= self._sent:
                    continue
                if row.metrics:
                    tracker.write(row.step, row.metrics)
                self._sent = row[:2]
            self._is_failing = False
            if is_last:
                return
            self._wait(_POLL_S)

    def _note_failure(self, error: Exception) -> None:
        text = redacted(f"{type(error).__name__}: {error}")[:_PROBLEM_CHARACTERS]
        print(text, flush=True)
        if not self._is_failing:
            message = f"{self._name}: {text}; it is tried again"
            with suppress(OSError):  # full disk or closed terminal: trackers never end a run
                append_event(self._paths.events, "tracker_failed", tracker=self._name, message=message)
                print(f"warning: {message}", file=self._console, flush=True)
        self._is_failing = True


def _watch(parent: int, ended: threading.Event, limit_s: float) -> None:
    """Set ``ended`` at the end of the run, and exit ``limit_s`` seconds later, because a package may hang."""
    while os.getppid() == parent and not select.select([0], [], [], _POLL_S)[0]:
        pass
    ended.set()
    time.sleep(limit_s)
    os._exit(1)


def main(root: str, name: str, resume_step: str, limit_s: str) -> int:
    """Follow the run to its end; return exit code 0 if the tracker has every row, 1 if it lacks the last."""
    ignore_signals()
    os.nice(10)
    console = os.fdopen(os.dup(2), "w")
    os.dup2(1, 2)
    sys.stdout, sys.stderr = (cast("TextIO", RedactingStream(stream)) for stream in (sys.stdout, sys.stderr))
    ended = threading.Event()
    watch = partial(_watch, os.getppid(), ended, float(limit_s))
    threading.Thread(target=watch, daemon=True).start()
    paths, wait = RunPaths(Path(root)), cast(Any, ended.wait)
    follower = Follower(paths, name, int(resume_step), TRACKERS[name], wait, console)
    return 0 if follower.follow() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
