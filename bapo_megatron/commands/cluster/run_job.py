"""Job state, logs and cancellation of a run, which is a Slurm job or a local process.

``read_job_state`` returns the ``JobState`` of the run's Slurm job, None if it never had one; ``lock_holder``
the id of a local process. ``bapo status`` calls both, ``bapo submit`` the former. ``newest_logs`` (``bapo
logs``) returns the main log files of the newest start: of the job, rank 0 and the servers. ``cancel`` (``bapo
cancel``) asks the run to save and stop, or kills it. A Slurm command fails after 15 s (SlurmError).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

from bapo_megatron.errors import ConfigError, printable, refuse_arguments
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths

RUNNING_STATES = ("RUNNING", "SIGNALING", "RESIZING")
"""Slurm states of a job whose processes run, also while Slurm signals them or takes nodes away."""

LIVE_STATES = (
    *RUNNING_STATES,
    *("PENDING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "EXPEDITING"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
)
"""Slurm states of a job that runs or will run, also if suspended by a preemption or held by Slurm."""

_DEFAULTS = ("SQUEUE_", "SCANCEL_")
_DEADLINE_S = 15.0
_FOLLOW_S, _LIST_S = 0.5, 5.0
"""Intervals at which followed logs are read, and listed: listing may ask Slurm, whose controller serves the
whole cluster."""
_LINES, _TAIL_BYTES = 40, 1 << 20
"""Most lines, and bytes, shown of a log."""
_COUNTERS = ("crash", "preemption", "time_limit", "node", "storage", "engines", "health")


@dataclass(frozen=True)
class JobState:
    """State of a run's Slurm job: job id, restart number, status, end time, nodes, requeues by reason. From
    RUN/slurm.state, which the job's script writes (slurm/lib/state.sh). Missing numbers are 0, texts ""."""

    job: str
    restart: int
    status: str
    """`submitted` (not yet begun), `running`, `requeued`, `done`, `stopped` or `cancelled`."""
    end: int
    """End of the job's time limit, seconds since 1970; 0 if unlimited."""
    nodes: str
    excluded: str
    requeues: dict[str, int]


def read_job_state(run: Path) -> JobState | None:
    """Return the state of the run's newest Slurm job; None if none was ever started or submitted for it.

    A submitted job has no state file until it begins, perhaps days later; its status is "submitted". It
    becomes the run's job once the previous one is over, for which this may ask Slurm.
    """
    begun, submitted = _read_state_file(run), _submitted(run)
    if submitted is None or (begun is not None and submitted <= int(begun.job)):
        return begun
    if begun is not None and begun.status not in ("done", "stopped", "cancelled"):
        queued = queue_state(begun.job)  # it may have been killed without a record
        if queued is None or queued[0] in LIVE_STATES:
            return begun
    return JobState(str(submitted), 0, "submitted", 0, "", "", dict.fromkeys(_COUNTERS, 0))


def _submitted(run: Path) -> int | None:
    try:
        return int(RunPaths(run).submitted_job.read_text())
    except FileNotFoundError:
        return None


def _read_state_file(run: Path) -> JobState | None:
    try:
        lines = RunPaths(run).slurm_state.read_text().splitlines()
    except FileNotFoundError:
        return None
    values = defaultdict[str, str](str, (line.partition("=")[::2] for line in lines))
    if not values["job"].isdecimal():
        _tell_without_job(RunPaths(run).slurm_state)
        return None
    return JobState(
        job=values["job"],
        restart=int(values["restart"] or 0),
        status=values["status"],
        end=int(values["end"] or 0),
        nodes=values["nodes"],
        excluded=values["excluded"],
        requeues={name: int(values[name] or 0) for name in _COUNTERS},
    )


@cache  # `bapo logs --follow` looks again and again
def _tell_without_job(state: Path) -> None:
    print(f"warning: {state} names no job of this run; `squeue --me` shows yours", file=sys.stderr)


def queue_state(job: str) -> tuple[str, str] | None:
    """Return a job's queue state and reason: ("", "") if not listed, None if Slurm does not answer."""
    try:
        output = call_slurm("squeue", "-h", "-j", job, "-o", "%T|%r")
    except SlurmError as error:
        return ("", "") if "Invalid job id" in str(error) else None
    lines = output.splitlines()
    if not lines:
        return ("", "")
    state, _, reason = lines[0].partition("|")
    return (state, "" if reason == "None" else reason)


class SlurmError(Exception):
    """Raised when a Slurm command fails, times out, or is not installed."""


def call_slurm(*command: str) -> str:
    """Return a Slurm command's standard output. Raises SlurmError on failure, timeout or absence."""
    # Without the user's defaults: SQUEUE_STATES hides jobs, SCANCEL_INTERACTIVE prompts.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_DEFAULTS)}
    try:
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from None
    if completed.returncode:
        raise SlurmError(f"{command[0]}: {completed.stderr.strip()}")
    return completed.stdout


def lock_holder(run: Path) -> int | None:
    """Return the id of the local process that holds the run's lock; None if there is none. Looks in
    /proc/locks: trying the lock could make a run that starts at that moment fail."""
    try:
        lock = RunPaths(run).lock.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:123456 0 EOF
        words = line.split()
        is_named = len(words) > 5 and words[1] == "FLOCK" and words[5].split(":")[-1] == str(lock.st_ino)
        if is_named and _has_open(int(words[4]), lock):
            return int(words[4])
    return None


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Whether a process has ``file`` open; True if it belongs to another user and cannot be read. /proc/locks
    is ambiguous: file systems may share an inode number, and its device may differ from stat's."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return True
    except OSError:
        return False
    for name in names:
        with suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), file):
                return True
    return False


# --- logs ----------------------------------------------------------------------------------------


def logs_command(arguments: Sequence[str]) -> None:
    """``bapo logs RUN [--follow] [--all]``: print the last lines of a run's newest logs."""
    run, switches = run_and_switches("logs", arguments, "--follow", "--all")
    (follow_logs if "--follow" in switches else show_logs)(run, sys.stdout, "--all" in switches)


def newest_logs(run: Path, every_rank: bool = False) -> list[Path]:
    """Return the newest start's log files, RUN/logs/JOB/RESTART/*.log: the job's, rank 0's and the servers',
    or all with ``every_rank``. Prefers the training job: a later one may evaluate or convert checkpoints.
    Of a local run: RUN/logs/*.log. Of a job that has not begun: Slurm's own output, if any."""
    starts = [folder for folder in RunPaths(run).logs.glob("[0-9]*/[0-9]*") if folder.is_dir()]
    if not starts:
        return sorted(RunPaths(run).logs.glob("*.log")) or _outputs(run, read_job_state(run))
    job = read_job_state(run)
    if job and job.status == "submitted" and (outputs := _outputs(run, job)):
        return outputs
    starts = [folder for folder in starts if job and folder.parent.name == job.job] or starts
    folder = max(starts, key=lambda start: (int(start.parent.name), int(start.name)))
    shown = ("[!.]*.log",) if every_rank else ("job*.log", "rollout*.log", "trainer*-0.log")
    return sorted(path for pattern in shown for path in folder.glob(pattern))


def _outputs(run: Path, job: JobState | None) -> list[Path]:
    """Return Slurm's own output of a job without logs."""
    return sorted(RunPaths(run).logs.glob(f"sbatch_*_{job.job}.out")) if job else []


def show_logs(run: Path, out: TextIO, every_rank: bool = False) -> dict[Path, int]:
    """Write each log's last lines to ``out``; return its end in bytes. Raises ConfigError without logs."""
    logs = newest_logs(run, every_rank)
    if not logs:
        raise ConfigError(
            f"{run} has no logs: a job that waits has none yet, and a run that was started by hand writes to "
            f"its terminal"
        )
    ends = {}
    for path in logs:
        text, ends[path] = _read_log(path, -_TAIL_BYTES)
        out.write(f"==> {path.relative_to(run)} <==\n")
        out.write("".join(f"{printable(line)}\n" for line in text.splitlines()[-_LINES:]))
    return ends


def _read_log(path: Path, begin: int) -> tuple[str, int]:
    """Return a log's text from byte ``begin``, counted from its end if negative, and where it ends: from its
    start if it is shorter, nothing if it has been deleted since it was listed."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, begin + size * (begin < 0)) if begin <= size else 0)
        return file.read().decode(errors="replace"), file.tell()  # not the size: the log may have grown
    return "", 0


def follow_logs(
    run: Path, out: TextIO, every_rank: bool = False, is_following: Callable[[], bool] = lambda: True
) -> None:
    """Print the last and then all new log lines, including later starts', until interrupted (`tail -f`)."""
    seen = show_logs(run, out, every_rank)
    last: Path | None = None
    logs, listed = list(seen), time.monotonic()
    while is_following():
        time.sleep(_FOLLOW_S)
        if time.monotonic() - listed >= _LIST_S:
            logs, listed = newest_logs(run, every_rank), time.monotonic()
        for path in logs:
            text, seen[path] = _read_log(path, seen.get(path, 0))
            if not text:
                continue
            if path != last:
                out.write(f"==> {path.relative_to(run)} <==\n")
                last = path
            out.write(printable(text.replace("\r\n", "\n").replace("\r", "\n")))
            out.flush()


# --- cancellation --------------------------------------------------------------------------------


def cancel_command(arguments: Sequence[str]) -> None:
    """``bapo cancel RUN [--now]``: stop a run after it has saved, or immediately."""
    run, switches = run_and_switches("cancel", arguments, "--now")
    print(cancel(run, "--now" in switches))


def cancel(run: Path, at_once: bool = False) -> str:
    """Ask the run to save and stop, or kill it if ``at_once``; return a sentence that says what was done.

    Uses Slurm if the run's job is in the queue, otherwise signals the local process that holds the run's
    lock; does not wait for the end. A job that is not running is cancelled without a save. Raises ConfigError
    if there is neither, or Slurm refuses or does not answer.
    """
    if not run.is_dir():
        raise ConfigError(f"run directory {run} does not exist")
    job = read_job_state(run)
    queued = queue_state(job.job) if job else None
    state = queued[0] if queued else ""
    if job is not None and state:
        try:
            if at_once or state not in RUNNING_STATES:
                call_slurm("scancel", job.job)
                return f"job {job.job} is cancelled"
            # Before the signal: once its ranks have saved, the job's script looks for this file, and would
            # otherwise requeue the job.
            write_atomically(RunPaths(run).stop, "bapo cancel\n")
            call_slurm("scancel", "--batch", "--signal=USR1", job.job)
        except SlurmError as error:
            # A job that continues must not stop at its next time limit.
            RunPaths(run).stop.unlink(missing_ok=True)
            raise ConfigError(f"job {job.job} could not be cancelled: {error}") from None
        return f"job {job.job} is told to save and stop; `bapo status {run}` shows when it has"
    if (pid := lock_holder(run)) is not None:
        os.kill(pid, signal.SIGKILL if at_once else signal.SIGTERM)
        return f"process {pid} is told to {'end' if at_once else 'stop'}"
    if job is not None and queued is None:
        raise ConfigError(f"Slurm does not answer, so job {job.job} of {run} is not cancelled: try it again")
    raise ConfigError(f"{run} is not running here, and no job of it is in the queue")


def run_and_switches(command: str, arguments: Sequence[str], *known: str) -> tuple[Path, set[str]]:
    """Return the run directory and the switches. Raises ConfigError for others; exits after ``--help``."""
    switches = {word for word in arguments if word.startswith("-")}
    names = [word for word in arguments if not word.startswith("-")]
    if len(names) != 1 or switches - set(known):
        usage = " ".join(["usage: bapo", command, "RUN", *(f"[{name}]" for name in known)])
        refuse_arguments(arguments, f"{usage}, with the directory of a run")
    return Path(names[0]), switches
