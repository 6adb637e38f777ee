"""Metrics log of a run: metrics.jsonl, updates.jsonl, evaluations.jsonl, TensorBoard, and the trackers.

Written by rank 0 through ``Recorder``, in a rollout-only run through ``RolloutRecord``. The files are the
record of the run; TensorBoard is written in this process, every other tracker by a process that follows the
files (``observer/``). Used in ``trainer/`` and this folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bapo_megatron.config import LoggingConfig
from bapo_megatron.runtime.jsonl_log import JsonlLog, finite_json, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.runtime.storage import writing
from bapo_megatron.trainer.records.observer.processes import Observers, Report
from bapo_megatron.types import Metrics

_BOARDS = "the boards' data"

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
        self._tensorboard: Any = None
        trackers = [name for name in logging.chosen if name != "tensorboard"]
        with writing(_BOARDS, run_dir):
            if "tensorboard" in logging.chosen:
                self._tensorboard = _tensorboard_writer(paths.tensorboard, resume_step)
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
        if self._tensorboard is not None:
            numbers = {name: value for name, value in finite_json(metrics).items() if value is not None}
            with writing(_BOARDS, self._run_dir):
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
