"""Metrics log of a run, on rank 0: metrics.jsonl, updates.jsonl, evaluations.jsonl; TensorBoard; trackers.

``MetricsLog`` writes the files, which are the run's record, and TensorBoard's own. Every other tracker (W&B,
trackio, MLflow), which may hang, fail or be slow, gets a separate process that follows the files
(``following.py``): only ``close`` waits for it, and its problems are events and warnings, never errors.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bapo_megatron.config import LoggingConfig
from bapo_megatron.errors import Preempted
from bapo_megatron.runtime.child_process import end_modules, exit_text, start_module
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.jsonl_log import JsonlLog, finite_json, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.runtime.storage import writing
from bapo_megatron.types import Metrics

_BOARDS = "the boards' data"

Report = Callable[..., None]
"""Records an event: its kind and, by name, its fields, including `message`."""


def evaluation_means(run_dir: Path) -> dict[int, float | None]:
    """Return ``kept_score`` of each evaluated step of a run, from its file; empty without evaluations."""
    log = RunPaths(run_dir).evaluations
    rows = read_jsonl(log) if log.exists() else []
    return {row["step"]: kept_score(row) for row in rows}


def kept_score(metrics: Metrics) -> float | None:
    """Return an evaluation's score for ``checkpoint.keep_best``: ``eval/mean`` with unjudged responses as
    wrong, so that an outage cannot make a checkpoint the best. None if none was judged."""
    mean = metrics["eval/mean"]
    unjudged = [value or 0.0 for name, value in metrics.items() if name.endswith("/unjudged")]
    return None if mean is None else mean * (1 - max(unjudged, default=0.0))


class MetricsLog:
    """Writer of a run's metrics, on rank 0: ``write_step``, ``write_update``, ``write_evaluation``,
    ``close``. Steps count from 1. Raises RunStopped if a write fails. ``resume_step``: the last step to keep,
    0 for a new run; the constructor deletes later lines, which the resumed run repeats. ``report`` records
    tracker events."""

    def __init__(self, paths: RunPaths, logging: LoggingConfig, resume_step: int, report: Report) -> None:
        self._steps = JsonlLog(paths.metrics)
        self._updates = JsonlLog(paths.updates)
        self._evaluations = JsonlLog(paths.evaluations)
        for log in (self._steps, self._updates, self._evaluations):
            log.rewind(resume_step)
        self._evaluated = evaluation_means(paths.root).keys()
        self._run_dir = paths.root
        self._open_tensorboard: Callable[[], Any] | None = None
        """Opens TensorBoard's file at the first metrics; None without TensorBoard."""
        self._tensorboard: Any = None
        trackers = [name for name in logging.chosen if name != "tensorboard"]
        with writing(_BOARDS, paths.root):
            if "tensorboard" in logging.chosen:
                self._open_tensorboard = partial(_tensorboard_writer, paths.tensorboard, resume_step)
            catch_up_s = logging.catch_up_minutes * 60
            self._boards = Boards(trackers, paths, resume_step, report, catch_up_s)

    def write_step(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of ``step`` to metrics.jsonl, TensorBoard and the trackers."""
        self._steps.append({"step": step, **metrics})
        self._show(step, metrics)

    def write_evaluation(self, step: int, metrics: Metrics) -> bool:
        """Write the evaluation of the weights after ``step``; return False if it was written before."""
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
        self._boards.check()

    def write_update(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one update of ``step`` to updates.jsonl only."""
        self._updates.append({"step": step, **metrics})

    def close(self) -> None:
        for log in (self._steps, self._updates, self._evaluations):
            log.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._boards.close()


def _tensorboard_writer(folder: Path, resume_step: int) -> Any:
    """Return a writer of TensorBoard event files that hides earlier files' entries for the steps to come."""
    # Imported here because it takes seconds.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=resume_step + 1)  # type: ignore[no-untyped-call]


PREEMPTED_S = 10.0
"""Longest wait for processes at a run's end after Ctrl-C or preemption, seconds: Slurm may kill it soon."""


def last_wait_s(limit_s: float) -> float:
    """Return the seconds that the end of a run may wait: ``limit_s``, or less by the error that ends it."""
    is_hurried = isinstance(sys.exception(), Preempted | KeyboardInterrupt)
    return min(PREEMPTED_S, limit_s) if is_hurried else limit_s


class Boards:
    """Tracker processes of a run, one per tracker (``following.py``). ``check`` reports processes that ended
    early. ``close`` waits at most ``catch_up_s`` (10 s after a preemption) until the trackers have all rows,
    then kills the rest."""

    def __init__(
        self, names: Sequence[str], paths: RunPaths, resume_step: int, report: Report, catch_up_s: float
    ) -> None:
        """Start the processes. ``resume_step``: the last step in the run's files."""
        self._report, self._catch_up_s = report, catch_up_s
        if names:
            paths.trackers.mkdir(exist_ok=True)
            paths.logs.mkdir(exist_ok=True)
            if not paths.wandb_id.exists():
                write_atomically(paths.wandb_id, uuid.uuid4().hex)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in names:
            program = "bapo_megatron.trainer.records.following", str(paths.root), name
            with paths.tracker_log(name).open("ab") as log:
                self._processes[name] = start_module(
                    *program, str(resume_step), str(catch_up_s), stdin=subprocess.PIPE, stdout=log, bufsize=0
                )

    def check(self) -> None:
        """Report each ended process once; the next start of the run restarts it."""
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                del self._processes[name]
                self._report_problem("tracker_failed", name, f"{name} gets no more metrics", process)

    def close(self) -> None:
        """Signal the end of the run, wait for the processes, and report trackers that lack rows."""
        end_modules(self._processes.values(), b"\n", last_wait_s(self._catch_up_s))
        for name, process in self._processes.items():
            if process.returncode:
                self._report_problem("tracker_behind", name, f"{name} may lack the last steps", process)

    def _report_problem(self, kind: str, name: str, problem: str, process: subprocess.Popen[bytes]) -> None:
        why = f"{exit_text(process.returncode)}, logs/tracker-{name}.log"
        message = f"{problem} ({why}): metrics.jsonl has them"
        self._report(kind, tracker=name, message=message)
        print(f"warning: {message}", flush=True)
