"""Metrics log of a run: metrics.jsonl, updates.jsonl, evaluations.jsonl; TensorBoard; observers of trackers.

Written by rank 0 through ``Recorder``, in a rollout-only run through ``RolloutRecord``. The files are the
record of the run. TensorBoard is written in this process. Every other tracker (W&B, trackio, MLflow), which
may hang, fail or be slow, gets an observer, a process that follows the files (``following.py``). Its side
here starts, notifies and restarts it: no call but ``close`` waits for a tracker, and its problems are events
and warnings, never errors. Used in ``trainer/`` and this folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bapo_megatron.config import LoggingConfig
from bapo_megatron.errors import Preempted
from bapo_megatron.runtime.child_process import ChildProcess, exit_text, with_import_path
from bapo_megatron.runtime.files import open_plain, write_atomically
from bapo_megatron.runtime.jsonl_log import JsonlLog, finite_json, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.runtime.storage import writing
from bapo_megatron.trainer.records.following import END, NEWS, TrackerState, read_state
from bapo_megatron.types import Metrics

_BOARDS = "the boards' data"

Report = Callable[..., None]
"""Records an event: its kind and, by name, its fields; one of them is the `message`."""

_ThreadHook = Callable[[threading.ExceptHookArgs], object]


def evaluation_means(run_dir: Path) -> dict[int, float]:
    """Score of each evaluated step of a run, ``eval/mean``, read from its file; none without evaluations."""
    log = RunPaths(run_dir).evaluations
    rows = read_jsonl(log) if log.exists() else []
    return {row["step"]: row["eval/mean"] for row in rows}


class MetricsLog:
    """The metrics log of one run, on rank 0. Steps count from 1. RunStopped if the disk does not take a line.

    ``resume_step``: the last step to keep; 0 for a new run. Opening the log drops the lines of later steps:
    the resumed run makes those steps again. ``report`` records the events of trackers. Made
    by ``Recorder``, or by ``RolloutRecord`` in a rollout-only run.
    """

    def __init__(self, run_dir: Path, logging: LoggingConfig, resume_step: int, report: Report) -> None:
        paths = RunPaths(run_dir)
        self._steps = JsonlLog(paths.metrics)
        self._updates = JsonlLog(paths.updates)
        self._evaluations = JsonlLog(paths.evaluations)
        for log in (self._steps, self._updates, self._evaluations):
            log.rewind(resume_step)
        self._evaluated = evaluation_means(run_dir).keys()
        self._run_dir = run_dir
        self._open_tensorboard: Callable[[], Any] | None = None
        """Opens TensorBoard's file, which begins with the first metrics; None without TensorBoard."""
        self._tensorboard: Any = None
        trackers = [name for name in logging.chosen if name != "tensorboard"]
        with writing(_BOARDS, run_dir):
            if "tensorboard" in logging.chosen:
                self._open_tensorboard = partial(_tensorboard_writer, paths.tensorboard, resume_step)
            catch_up_s = logging.catch_up_minutes * 60
            self._observers = Observers(trackers, paths, resume_step, report, catch_up_s)

    def write_step(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of ``step`` to metrics.jsonl, TensorBoard and the trackers."""
        self._steps.append({"step": step, **metrics})  # before the boards, whose observers read the file
        self._show(step, metrics)

    def write_evaluation(self, step: int, metrics: Metrics) -> bool:
        """Write the evaluation of the weights after ``step``; False if it was written before."""
        if step in self._evaluated:
            return False
        self._evaluations.append({"step": step, **metrics})
        self._show(step, metrics)
        return True

    def _show(self, step: int, metrics: Metrics) -> None:
        if self._open_tensorboard is not None:
            numbers = {name: value for name, value in finite_json(metrics).items() if value is not None}
            with writing(_BOARDS, self._run_dir):
                self._tensorboard = self._tensorboard or self._open_tensorboard()
                for name, value in numbers.items():
                    self._tensorboard.add_scalar(name, value, step)
                self._tensorboard.flush()
        self._observers.tell(step)

    def write_update(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one update of ``step`` to updates.jsonl; TensorBoard and trackers get none."""
        self._updates.append({"step": step, **metrics})

    def close(self) -> None:
        """Flush and release everything."""
        self._steps.close()
        self._updates.close()
        self._evaluations.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._observers.close()


def _tensorboard_writer(folder: Path, resume_step: int) -> Any:
    """Writer of TensorBoard's event files, which hides what earlier ones say of the steps to come."""
    # Imported here because it takes seconds.
    from torch.utils.tensorboard import SummaryWriter

    threading.excepthook = _without_tensorboards(threading.excepthook)
    return SummaryWriter(str(folder), purge_step=resume_step + 1)  # type: ignore[no-untyped-call]


def _without_tensorboards(hook: _ThreadHook) -> _ThreadHook:
    """Exception hook of threads that leaves out TensorBoard's: its error is raised by the next write."""

    def report(error: threading.ExceptHookArgs) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            hook(error)

    return report


PREEMPTED_S = 10.0
"""Seconds that all trackers together have to catch up after Ctrl-C, and at the end of a preempted run: Slurm
may kill it soon, and its exit code is lost."""

HANG_S = 600.0
"""Seconds without progress of an observer that is behind, after which it is restarted. A pause between two
attempts is shorter."""

_RESTART_S = 60.0
"""Least seconds between two starts of an observer: a tracker that crashes at once must not cost the run."""


class Observers:
    """The observers of a run, one process for each tracker. Made by ``MetricsLog``, on rank 0.

    ``tell`` after each written row; ``close`` at the end, which waits at most ``logging.catch_up_minutes``
    until trackers have all rows, and ends the processes.
    """

    def __init__(
        self,
        names: Sequence[str],
        paths: RunPaths,
        resume_step: int,
        report: Report,
        catch_up_s: float = 60.0,
    ) -> None:
        """Start the observers.

        ``resume_step``: the last step that the run's files have; ``catch_up_s``: the longest wait of
        ``close``.
        """
        self._catch_up_s = catch_up_s
        if names:
            paths.trackers.mkdir(exist_ok=True)
            paths.logs.mkdir(exist_ok=True)
            for left in paths.trackers.glob(".*.tmp"):  # by an observer that was killed
                left.unlink(missing_ok=True)
            if not paths.wandb_id.exists():
                write_atomically(paths.wandb_id, uuid.uuid4().hex)
        self._observers = [_ObserverProcess(name, paths, resume_step, report) for name in names]

    def tell(self, step: int) -> None:
        """Notify the observers that rows up to ``step`` are in the files, and report their problems."""
        for observer in self._observers:
            observer.tell(step)

    def close(self, limit_s: float | None = None) -> None:
        """Wait at most ``limit_s`` seconds until every tracker has all rows, then end the observers.

        None: ``catch_up_s``, or at most ``PREEMPTED_S`` while a preemption or Ctrl-C is being handled.
        """
        if limit_s is None:
            limit_s = self._catch_up_s
            if isinstance(sys.exception(), Preempted | KeyboardInterrupt):
                limit_s = min(PREEMPTED_S, limit_s)
        # END to all first: they catch up side by side, within one deadline.
        for observer in self._observers:
            observer.send(END)
        deadline = time.monotonic() + limit_s
        for observer in self._observers:
            observer.end(max(0.0, deadline - time.monotonic()))


class _ObserverProcess:
    """Supervisor of one observer: its process, and the state file that the observer writes."""

    def __init__(self, name: str, paths: RunPaths, resume_step: int, report: Report) -> None:
        self._name, self._paths, self._report = name, paths, report
        self._step = resume_step
        self._state = replace(self._read(), kept=None)
        self._has_problem = self._has_reported_kept = False
        self._start()

    def tell(self, step: int) -> None:
        self._check()
        self._step = max(self._step, step)
        self.send(NEWS)

    def send(self, message: bytes) -> None:
        # A full pipe has enough messages; an observer that has ended is noticed by `_check`.
        with suppress(OSError):
            os.write(self._pipe, message)

    def end(self, limit_s: float) -> None:
        """Wait for it to end by itself, and report rows that its tracker lacks."""
        code = self._child.wait_end(limit_s)
        self._child.close()
        self._take_state()
        if code == 0:
            return
        why = self._state.problem or (exit_text(code) if code else f"no end within {limit_s:.0f} s")
        self._report_problem(
            "tracker_behind",
            f"{self._name} has steps up to {max(self._state.step, 0)} of {self._step} ({why}): "
            f"`bapo train` on this run directory sends the rest",
        )

    def _take_state(self) -> None:
        """Read its state file, and report what is new: a problem, the end of one, kept steps."""
        state = self._read()
        if state == self._state:
            return
        self._state, self._moved_s = state, time.monotonic()
        self._report_kept_steps()
        if state.problem and not self._has_problem:
            self._report_problem("tracker_failed", f"{self._name}: {state.problem}; it is tried again")
        elif self._has_problem and not state.problem:
            self._report_problem("tracker_back", f"{self._name} takes metrics again", "note")
        self._has_problem = state.problem is not None

    def _check(self) -> None:
        """Health check: report what is new, and restart the observer if it has ended or hangs."""
        self._take_state()
        now = time.monotonic()
        if self._state.step >= self._step:
            self._moved_s = now
        code = self._child.wait_end(0)
        if code is None and now - self._moved_s < HANG_S:
            return
        if now - self._started_s >= _RESTART_S:
            if not self._has_problem:
                ended = f"no answer for {HANG_S / 60:.0f} minutes" if code is None else exit_text(code)
                log = self._paths.tracker_log(self._name)
                self._report_problem("tracker_failed", f"{self._name}: {ended} ({log}); it is restarted")
            self._has_problem = True
            self._child.close()
            self._start()

    def _report_kept_steps(self) -> None:
        """Report, once, the steps beyond the checkpoint that the tracker keeps from before this start."""
        if self._state.kept is not None and not self._has_reported_kept:
            self._has_reported_kept = True
            self._report_problem(
                "tracker_kept",
                f"{self._name} has steps up to {self._state.kept} from before this start, which makes the "
                f"last of them again: the tracker keeps their first values, metrics.jsonl has the new ones",
                "note",
            )

    def _start(self) -> None:
        arguments = [str(self._paths.root), self._name, str(self._step)]
        log = open_plain(self._paths.tracker_log(self._name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._child = ChildProcess(
                [sys.executable, "-m", "bapo_megatron.trainer.records.following", *arguments],
                with_import_path(os.environ),
                False,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(log)
        assert self._child.process.stdin is not None
        self._pipe = self._child.process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._started_s = self._moved_s = time.monotonic()

    def _read(self) -> TrackerState:
        return read_state(self._paths.tracker_state(self._name))

    def _report_problem(self, kind: str, message: str, word: str = "warning") -> None:
        """Record an event of the tracker and print it as a warning, or as the ``word``."""
        self._report(kind, tracker=self._name, message=message)
        print(f"{word}: {message}", flush=True)
