"""Observer loop: forwards each row of a run's metrics files to one tracker, in order, with retries.

Runs in the observer's own process. Each step is sent once, also over restarts: the tracker, or else the state
file, says which step it has last. A tracker that cannot tell may get a row twice, after a kill or an error of
its own. Used by
``__main__.py`` and ``processes.py``.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bapo_megatron.runtime.events.kinds import ENDS, last_turn
from bapo_megatron.runtime.jsonl_log import tail_rows
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records.observer.rows import EVALUATION_MARK, STEP_MARK, TrackedRows
from bapo_megatron.trainer.records.observer.state import TrackerState, read_state, write_state
from bapo_megatron.trainer.records.observer.trackers import RunEnd, TrackedRun, Tracker, redacted, tracked_run

NEWS, END = b"n", b"e"
"""Messages from the run to an observer: new rows; end after the rows that are there."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 240.0
"""Exponential backoff between attempts: each pause is twice the one before."""

_SAVE_S = 1.0
"""Seconds between two writes of the state file while rows are caught up: a file system may be slow."""

_PROBLEM_CHARACTERS = 500


class Inbox:
    """Inbox of an observer: the reading end of the pipe from the run, which says "new rows" and "end".

    ``wait`` blocks; ``is_ending`` is True once the run has said "end", or is gone. Made by ``__main__.py``,
    read by ``Observer``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_ending = False

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for a message, at most ``limit_s`` seconds."""
        ready = select.poll()
        ready.register(self._descriptor, select.POLLIN)
        if not self.is_ending and ready.poll(None if limit_s is None else limit_s * 1000):
            self.receive()

    def receive(self) -> None:
        """Take the messages that are there. A closed pipe (the run is gone) counts as END."""
        data = os.read(self._descriptor, 1 << 16)
        self.is_ending = self.is_ending or not data or END in data


class Observer:
    """Follower of one run for one tracker, in its own process; ``observe`` returns at the end of the run.

    ``resume_step``: the last step that the run has on disk. Errors of the tracker are noted in its state
    file, which the run reads, and tried again after a pause; none is raised. Made by ``__main__.py``.
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
