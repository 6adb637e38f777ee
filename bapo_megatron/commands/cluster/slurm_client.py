"""Slurm client: calls of squeue and others with a deadline, and the reader of a job's state file.

``status.py`` calls it. Used by ``status.py``.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.runtime.run_paths import RunPaths

_DEADLINE_S = 15.0
_COUNTERS = ("crash", "preemption", "time_limit", "node", "storage", "engines", "health")


@dataclass(frozen=True)
class JobState:
    """State of a Slurm job, as plain data from RUN/slurm.state, which slurm/lib/state.sh writes.

    A number that the file lacks is 0, a text "". Made by ``read_job_state`` for `bapo status` and `bapo
    cancel`.
    """

    job: str
    restart: int
    status: str
    """`running`, `requeued`, `done`, `stopped` or `cancelled`."""
    end: int
    """End of the job's time limit, in seconds since 1970; 0 if it has none."""
    nodes: str
    excluded: str
    requeues: dict[str, int]


def read_job_state(run: Path) -> JobState | None:
    """The state file of the run's job; None if no job was ever started for it."""
    try:
        lines = RunPaths(run).slurm_state.read_text().splitlines()
    except FileNotFoundError:
        return None
    found = dict(line.partition("=")[::2] for line in lines)
    return JobState(
        job=found.get("job", ""),
        restart=_number(found.get("restart")),
        status=found.get("status", ""),
        end=_number(found.get("end")),
        nodes=found.get("nodes", ""),
        excluded=found.get("excluded", ""),
        requeues={name: _number(found.get(name)) for name in _COUNTERS},
    )


def queue_state(job: str) -> tuple[str, str] | None:
    """Queue state and reason of a job; ("", "") if squeue does not list it, None if Slurm does not answer."""
    try:
        found = call("squeue", "-h", "-j", job, "-o", "%T|%r")
    except SlurmError as error:
        return ("", "") if "Invalid job id" in str(error) else None
    lines = found.splitlines()
    if not lines:
        return ("", "")
    state, _, reason = lines[0].partition("|")
    return (state, "" if reason == "None" else reason)


class SlurmError(Exception):
    """Error of a Slurm command that failed, gave no answer in time, or is not installed.

    Raised by ``call``.
    """


def call(*command: str) -> str:
    """The standard output of a Slurm command. SlurmError if it fails, hangs or is not installed."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from None
    if found.returncode:
        raise SlurmError(f"{command[0]}: {found.stderr.strip()}")
    return found.stdout


def _number(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"-?[0-9]{1,15}", text) else 0
