"""Log files of a run's newest start, printed or followed; and the cancellation of a run.

Slurm jobs write RUN/logs/JOB/RESTART/*.log. ConfigError if there is no log, or nothing to cancel.
``commands.py`` calls it for `bapo logs` and `bapo cancel`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from bapo_megatron.commands.cluster.slurm_client import SlurmError, call, queue_state, read_job_state
from bapo_megatron.commands.cluster.status import lock_holder
from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_files import read_plain
from bapo_megatron.runtime.run_paths import RunPaths

_LINES = 40
_TAIL_BYTES = 1 << 20


def newest_logs(run: Path, every_rank: bool = False) -> list[Path]:
    """Log files of the newest start: the job's, rank 0's and the servers'; with ``every_rank`` all."""
    starts = [
        folder for folder in RunPaths(run).logs.glob("*/*") if folder.is_dir() and folder.name.isdigit()
    ]
    if not starts:
        return sorted(RunPaths(run).logs.glob("*.log"))
    folder = max(starts, key=lambda one: (_number(one.parent.name), int(one.name)))
    logs = [path for path in sorted(folder.glob("*.log")) if not path.name.startswith(".")]
    return [path for path in logs if every_rank or _is_shown(path.name)]


def show_logs(run: Path, out: TextIO, every_rank: bool = False) -> None:
    """Print the last lines of each log. ConfigError if the run has none."""
    logs = newest_logs(run, every_rank)
    if not logs:
        raise ConfigError(f"{run} has no logs: a run that was started by hand writes to its terminal")
    for path in logs:
        with read_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        out.write(f"==> {path.relative_to(run)} <==\n")
        out.write("".join(f"{printable(line)}\n" for line in lines[-_LINES:]))


def follow_logs(
    run: Path, out: TextIO, every_rank: bool = False, is_following: Callable[[], bool] = lambda: True
) -> None:
    """Print new log lines, also those of later starts, until interrupted (`tail -f`)."""
    show_logs(run, out, every_rank)
    seen = {path: path.stat().st_size for path in newest_logs(run, every_rank)}
    last: Path | None = None
    while is_following():
        time.sleep(0.5)
        for path in newest_logs(run, every_rank):
            size = path.stat().st_size
            with read_plain(path) as file:
                file.seek(seen.get(path, 0) if size >= seen.get(path, 0) else 0)
                text = file.read().decode(errors="replace")
            seen[path] = size
            if not text:
                continue
            if path != last:
                out.write(f"==> {path.relative_to(run)} <==\n")
                last = path
            out.write(printable(text.replace("\r\n", "\n").replace("\r", "\n")))
            out.flush()


def cancel(run: Path, at_once: bool = False) -> str:
    """Cancel the run: it saves first, unless ``at_once``. Returns a sentence that says what was done.

    By Slurm if its job is in the queue, else by a signal to the process here that holds the run's lock.
    ConfigError if there is neither, or Slurm refuses.
    """
    if not run.is_dir():
        raise ConfigError(f"run directory {run} does not exist")
    job = read_job_state(run)
    queued = queue_state(job.job) if job else None
    state = queued[0] if queued else ""
    if job is not None and state:
        try:
            if at_once or state != "RUNNING":
                call("scancel", job.job)
                return f"job {job.job} is cancelled"
            # Before the signal: the job's script looks for this file once its ranks have saved, and a job
            # that does not find it would requeue itself.
            write_atomically(RunPaths(run).stop, "bapo cancel\n")
            call("scancel", "--batch", "--signal=USR1", job.job)
        except SlurmError as error:
            raise ConfigError(f"job {job.job} could not be cancelled: {error}") from None
        return f"job {job.job} is told to save and stop; `bapo status {run}` shows when it has"
    if (pid := lock_holder(run)) is not None:
        os.kill(pid, signal.SIGKILL if at_once else signal.SIGTERM)
        return f"process {pid} is told to {'end' if at_once else 'stop'}"
    raise ConfigError(f"{run} is not running here, and no job of it is in the queue")


def _is_shown(name: str) -> bool:
    return name.startswith(("job", "rollout")) or (name.startswith("trainer") and name.endswith("-0.log"))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1
