"""Observer process: forwards each row of a run's metrics files to one tracker, in order, with retries.

    python -m bapo_megatron.trainer.records.following RUN NAME STEP LIFELINE

RUN: the run directory; STEP: the last step on disk; LIFELINE: a pipe that closes when the run is gone.
``metrics_log.py`` starts one for each tracker. It ignores the signals that reach all processes of a job: the
run ends it, after the last rows or a limit.

Each step is sent once, also over restarts: the tracker, or else the state file, RUN/trackers/NAME.json, says
which step it has last. A tracker that cannot tell may get a row twice, after a kill or an error of its own.
Used by ``metrics_log.py``.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

from bapo_megatron.runtime.event_kinds import ENDS, last_turn
from bapo_megatron.runtime.files import read_plain, write_atomically
from bapo_megatron.runtime.jsonl_log import parse_row, tail_rows
from bapo_megatron.runtime.processes import die_with_parent
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records.trackers import (
    EVALUATION_MARK,
    NOTHING,
    STEP_MARK,
    TRACKERS,
    RedactingStream,
    RunEnd,
    TrackedRun,
    Tracker,
    redacted,
    tracked_run,
)

NEWS, END = b"n", b"e"
"""Messages from the run to an observer: new rows; end after the rows that are there."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 240.0
"""Exponential backoff between attempts: each pause is twice the one before."""

_SAVE_S = 1.0
"""Seconds between two writes of the state file while rows are caught up: a file system may be slow."""

_PROBLEM_CHARACTERS = 500

_MOST_BYTES = 1 << 20
"""Most of a state file that is read."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class TrackerState:
    """Progress of one tracker, and its last problem: the content of its state file. Plain data.

    Only the observer writes it, atomically; ``Observers`` reads it while the run goes on.
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


@dataclass(frozen=True)
class TrackedRow:
    """A row for a tracker, as plain data: the numbers of a step, or of an evaluation of its weights."""

    step: int
    is_evaluation: bool
    metrics: dict[str, float]


class TrackedRows:
    """Tail of metrics.jsonl and evaluations.jsonl, from their first row on, while the run writes them."""

    def __init__(self, paths: RunPaths) -> None:
        self._steps, self._evaluations = _Tail(paths.metrics, False), _Tail(paths.evaluations, True)

    def new(self) -> Iterator[TrackedRow]:
        """The rows since the last call, one step at a time in memory: a long run has hundreds of megabytes.

        The end of the steps is noted first: the evaluations before a step were written before it, so none
        comes late.
        """
        end = self._steps.end()
        evaluations = [*self._evaluations.rows(self._evaluations.end())]
        return heapq.merge(self._steps.rows(end), evaluations, key=lambda row: (row.step, row.is_evaluation))


class _Tail:
    """Tail of one log, from its first line on; a line that is being written waits until it is whole."""

    def __init__(self, path: Path, is_evaluation: bool) -> None:
        self._path, self._is_evaluation, self._offset = path, is_evaluation, 0

    def end(self) -> int:
        """The present size of the file."""
        return self._path.stat().st_size

    def rows(self, end: int) -> Iterator[TrackedRow]:
        """The rows since the last call whose lines begin before the byte ``end``."""
        with read_plain(self._path) as file:
            file.seek(self._offset)
            while self._offset < end and (line := file.readline()).endswith(b"\n"):
                values = parse_row(line)
                step = values.pop("step")
                numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
                self._offset += len(line)
                yield TrackedRow(step, self._is_evaluation, numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Inbox:
    """Inbox of an observer: the reading end of the pipe from the run, which says "new rows" and "end".

    ``wait`` blocks; ``is_ending`` is True once the run has said "end", or is gone. Read by ``Observer``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_ending = False

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for messages, at most ``limit_s`` seconds. A closed pipe (the run is gone) counts as END."""
        ready = select.poll()
        ready.register(self._descriptor, select.POLLIN)
        if not self.is_ending and ready.poll(None if limit_s is None else limit_s * 1000):
            data = os.read(self._descriptor, 1 << 16)
            self.is_ending = not data or END in data


class Observer:
    """Follower of one run for one tracker, in its own process; ``observe`` returns at the end of the run.

    ``resume_step``: the last step that the run has on disk. Errors of the tracker are noted in its state
    file, which the run reads, and tried again after a pause; none is raised.
    """

    def __init__(
        self, root: Path, name: str, resume_step: int, opened: Callable[[TrackedRun], Tracker], inbox: Inbox
    ) -> None:
        self._paths, self._name, self._opened, self._inbox = RunPaths(root), name, opened, inbox
        self._resume_step: int | None = resume_step
        self._file = self._paths.tracker_state(name)
        self._state = replace(read_state(self._file), kept=None)
        self._is_of_earlier_version = self._state.is_of_earlier_version
        self._saved_s = 0.0

    def observe(self) -> bool:
        """Follow the run to its end; False if the last attempt to write the last rows failed."""
        pause_s = FIRST_PAUSE_S
        while True:
            is_last, written = self._inbox.is_ending, self._state
            try:
                self._follow()
                return True
            except Exception as error:  # whatever the package or its server raises
                self._note(error)
            if is_last:
                return False
            if (self._state.step, self._state.evaluation) != (written.step, written.evaluation):
                pause_s = FIRST_PAUSE_S
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _follow(self) -> None:
        run = tracked_run(self._paths.root, self._name, self._is_of_earlier_version)
        if not self._is_of_earlier_version:
            self._state = replace(self._state, project=run.project)
        tracker = self._opened(run)
        try:
            self._write_all(tracker)
        except BaseException:
            with suppress(Exception):
                tracker.close(None)
            raise
        tracker.close(self._end())

    def _end(self) -> RunEnd:
        """How the run has ended: it records its end before it ends its observers."""
        last = last_turn(tail_rows(self._paths.events))
        return cast("RunEnd", last) if last in ENDS else "killed"

    def _write_all(self, tracker: Tracker) -> None:
        # The tracker's own answer comes before the state file: after a kill either may have fewer rows.
        step, evaluation = tracker.last_step(STEP_MARK), tracker.last_step(EVALUATION_MARK)
        if step is not None and evaluation is not None:
            self._state = replace(self._state, step=step, evaluation=evaluation)
        self._note_kept_steps()
        rows = TrackedRows(self._paths)
        while True:
            is_last = self._inbox.is_ending  # before the read: rows that were written before END are in it
            for row in rows.new():
                done = self._state.evaluation if row.is_evaluation else self._state.step
                if row.step <= done:
                    continue
                if row.metrics:
                    tracker.write(row.step, row.metrics)
                place: dict[str, Any] = {"evaluation" if row.is_evaluation else "step": row.step}
                self._save(replace(self._state, **place, problem=None), _SAVE_S)
            self._save(replace(self._state, problem=None))
            if is_last:
                return
            self._inbox.wait()

    def _note_kept_steps(self) -> None:
        """Note the steps that the tracker has beyond the checkpoint: it keeps them as they were first."""
        if self._resume_step is not None and self._state.step > self._resume_step:
            self._save(replace(self._state, kept=self._state.step))
        self._resume_step = None  # later steps are of this start

    def _pause(self, limit_s: float) -> None:
        """Wait ``limit_s`` seconds, also through news; no longer once the run ends."""
        deadline = time.monotonic() + limit_s
        while not self._inbox.is_ending and (left := deadline - time.monotonic()) > 0:
            self._inbox.wait(left)

    def _note(self, error: Exception) -> None:
        text = redacted(f"{type(error).__name__}: {error}")[:_PROBLEM_CHARACTERS]
        print(text, flush=True)
        self._save(replace(self._state, problem=text, attempts=self._state.attempts + 1))

    def _save(self, state: TrackerState, least_s: float = 0.0) -> None:
        """Keep ``state``, and write it unless the file is younger than ``least_s`` seconds."""
        self._state = state
        if time.monotonic() - self._saved_s >= least_s:
            write_state(self._file, state)
            self._saved_s = time.monotonic()


def main(root: str, name: str, resume_step: str, lifeline: str) -> int:
    """Entry point. Exit code 0 if the tracker has every row, 1 if it lacks the last ones."""
    die_with_parent(int(lifeline))
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    os.nice(10)
    sys.stdout, sys.stderr = (cast("TextIO", RedactingStream(stream)) for stream in (sys.stdout, sys.stderr))
    observer = Observer(Path(root), name, int(resume_step), TRACKERS[name], Inbox(sys.stdin.fileno()))
    return 0 if observer.observe() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
