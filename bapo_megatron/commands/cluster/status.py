"""``bapo status``: status of a run, read from its directory and Slurm's queue.

``read_status`` returns a ``Status``, ``status_text`` its text. Takes no lock and leaves nothing behind. File
ages use the file system's clock, which may differ from this machine's. Since a file system may hang,
``status_command`` reads the status in a child process with a deadline of 30 s.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from bapo_megatron.checkpoint.fork_record import lineage_text
from bapo_megatron.checkpoint.run_directory import read_config
from bapo_megatron.commands.cluster.run_job import (
    LIVE_STATES,
    JobState,
    lock_holder,
    queue_state,
    read_job_state,
    run_and_switches,
)
from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.runtime.child_process import ChildDied, NoAnswer, within
from bapo_megatron.runtime.event_kinds import ENDS, event_text, event_time_s, is_trouble, last_turn
from bapo_megatron.runtime.files import file_time
from bapo_megatron.runtime.jsonl_log import parse_row, rows_from_end
from bapo_megatron.runtime.run_paths import MANIFEST, Moment, RunPaths, step_entries
from bapo_megatron.runtime.text_table import text_table

FRESH_S = 60.0
"""Age in seconds at which an entry in RUN/engines counts as dead."""
_UNENDED = ("submitted", "running", "requeued")
"""Statuses of a job that has not recorded its end."""
_WATCH_S = 5.0
_STATUS_DEADLINE_S = 30.0
"""Deadline for reading the status, seconds; longer than Slurm's own deadline."""
_CLOCK_S = 2.0


def status_command(arguments: Sequence[str]) -> None:
    """``bapo status RUN [--watch]``: print a run's status, with ``--watch`` every 5 s. Exits with an error if
    its file system hangs."""
    run, switches = run_and_switches("status", arguments, "--watch")
    while True:
        try:
            text = within(_STATUS_DEADLINE_S, lambda: status_text(read_status(run)))
        except NoAnswer:
            text = f"{run} has not answered for {_STATUS_DEADLINE_S:g} s: its file system hangs\n"
            if "--watch" not in switches:
                sys.exit(text.rstrip())
        if "--watch" not in switches:
            print(text, end="")
            return
        from rich.console import Console

        Console(force_terminal=sys.stdout.isatty()).clear()  # clears a terminal, does nothing in a pipe
        print(text, flush=True)
        time.sleep(_WATCH_S)


@dataclass(frozen=True)
class Status:
    """Status of a run at one moment: its job, state, last finished step (0: none) and its metrics, newest
    checkpoint, engines, and last error. None where unknown or absent."""

    run: Path
    job: JobState | None
    """Slurm job; None if there was none, or if the run now continues as a local process."""
    state: str
    """State of the job or local process, in words."""
    seconds_left: float | None
    step: int
    step_age_s: float | None
    steps: int | None
    metrics: dict[str, Any]
    checkpoint: int | None
    checkpoint_age_s: float | None
    engines: tuple[int, int] | None
    """Live and registered engines, by RUN/engines or the sampler's last metrics."""
    trouble: str | None
    """Last error event, as text."""
    trouble_age_s: float | None
    forked: str | None = None
    """Run and step of its fork source, as text."""
    has_responses: bool = False
    """Whether sampled responses wait for the next start."""


def read_status(run: Path, now: float | None = None) -> Status:
    """Return the status of ``run``. Raises ConfigError if it is not a run directory. ``now``: the time for
    all clocks; None: this machine's, and for file ages the file system's."""
    paths = RunPaths(run)
    known = (paths.config, paths.slurm_state, paths.events, paths.submitted_job)
    if not any(path.exists() for path in known):
        names = f"{paths.config.name} nor {paths.slurm_state.name}"
        raise ConfigError(
            f"{run} is not a run directory: it has neither {names} (nor has that of a job by plain sbatch "
            f"which still waits: `squeue --me`)"
        )
    files_now = _files_now(run) if now is None else now
    now = time.time() if now is None else now
    job, pid = read_job_state(run), lock_holder(run)
    if job is not None and job.status != "running" and pid is not None:
        job = None  # the run continues by hand
    metrics = next(rows_from_end(paths.metrics), {})
    config = read_config(run) or {}
    saved = _newest_checkpoint(run)
    trouble = next((row for row in rows_from_end(paths.events) if is_trouble(row)), None)
    trouble_s = event_time_s(trouble) if trouble else None
    running = job is not None and job.status == "running" and job.end > 0
    state = _state(run, job, pid)
    waits = state.startswith("PENDING")  # a requeued job has lost its nodes and servers
    runs = not waits and state.split(" ")[0] in (*LIVE_STATES, "COMPLETING", "running")
    return Status(
        run=run,
        job=replace(job, nodes="") if job and waits else job,
        state=state,
        seconds_left=job.end - now if job and running else None,
        step=int(metrics.get("step", 0)),
        step_age_s=files_now - paths.metrics.stat().st_mtime if metrics else None,
        steps=config.get("steps"),
        metrics=metrics,
        checkpoint=saved[0][0] if saved else None,
        checkpoint_age_s=files_now - saved[1] if saved else None,
        engines=_engines(run, metrics, config, files_now, job.job if job else None) if runs else None,
        trouble=event_text(trouble) if trouble else None,
        trouble_age_s=None if trouble_s is None else now - trouble_s,
        forked=lineage_text(run),
        has_responses=any(paths.journal.glob("segments-*.log")),
    )


def _files_now(run: Path) -> float:
    """Return the time by the run's file system, or by this machine if that takes more than ``_CLOCK_S``: it
    needs a write, which may take minutes on a busy disk."""

    def ask() -> float:
        # The process lives while the disk hangs, and must not hold the pipe that a reader waits for.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        return file_time(run)

    try:
        return within(_CLOCK_S, ask)
    except (NoAnswer, ChildDied):
        return time.time()


def _newest_checkpoint(run: Path) -> tuple[Moment, float] | None:
    """Return moment and time of the newest complete checkpoint, which its manifest, written last, marks."""
    saved = [
        (moment, manifest.stat().st_mtime)
        for moment, path in step_entries(RunPaths(run).checkpoints)
        if (manifest := path / MANIFEST).exists()
    ]
    return max(saved, default=None)


def _state(run: Path, job: JobState | None, pid: int | None) -> str:
    if job is None:
        return f"running here, process {pid}" if pid else _ended(run)
    queued = queue_state(job.job)
    if queued is None:
        return f"{job.status} (Slurm does not answer here)"
    state, reason = queued
    if state in (*LIVE_STATES, "COMPLETING"):
        return f"{state} ({reason})" if reason else state
    if job.status not in _UNENDED:
        return job.status
    return f"{state or 'not in the queue'}; it was {job.status}, and ended without a record (`bapo logs`)"


def _ended(run: Path) -> str:
    """Return the state of a local run that no process here has open, from its last start or end event."""
    last = last_turn(rows_from_end(RunPaths(run).events))
    if last is None or last in ENDS:
        return f"not running, {last}" if last else "not running"
    return "not running here, and no end is recorded: killed, or on another machine"


def _engines(
    run: Path, metrics: dict[str, Any], config: dict[str, Any], now: float, job: str | None
) -> tuple[int, int] | None:
    """Return live and known engines: those that servers have registered, else those of the last metrics.
    Silent entries of other jobs are left out: a former job's stay in the folder."""
    ready = known = 0
    for file in RunPaths(run).engines.glob("*.json"):
        try:
            entry, is_fresh = parse_row(file.read_bytes()), now - file.stat().st_mtime < FRESH_S
        except (OSError, ValueError):  # it is being replaced
            continue
        ready += is_fresh and entry.get("state") == "ready"
        known += is_fresh or str(entry.get("job")) == job
    if known:
        return ready, known
    if (alive := metrics.get("sampler/engines")) is None:
        return None
    servers = len(config.get("rollout.sglang.urls") or ()) or config.get("rollout.sglang.servers", 1)
    started = servers if config.get("rollout.engine") == "sglang" else 1
    return int(alive), max(int(alive), started)


def status_text(status: Status) -> str:
    """Return the status as lines of text."""
    rows = [(name, printable(text)) for name, text in _rows(status)]
    return "".join(f"{line}\n" for line in text_table(rows))


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    yield "run", str(status.run)
    if status.forked is not None:
        yield "forked from", status.forked
    yield "job", _job(status)
    yield "step", _step(status)
    if status.checkpoint is None:
        told = "; responses are kept, and the same command continues with them"
        kept = told if status.has_responses else ""
        yield "checkpoint", f"none yet{kept}"
    else:
        yield "checkpoint", f"step {status.checkpoint}, {ago(status.checkpoint_age_s)}"
    if status.engines is not None:
        alive, known = status.engines
        yield "engines", f"{alive} of {known} alive"
    if status.job is not None:
        counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in status.job.requeues.items())
        yield "requeues", counts
        if status.job.excluded:
            yield "left out", status.job.excluded
    if status.trouble is not None:
        yield "last error", f"{ago(status.trouble_age_s)}: {' '.join(status.trouble.split())}"


def _job(status: Status) -> str:
    if status.job is None:
        return status.state
    parts = [status.job.job, status.state, f"restart {status.job.restart}"]
    if status.job.nodes:
        parts.append(f"on {status.job.nodes}")
    if status.seconds_left is not None:
        parts.append(f"{clock(max(0.0, status.seconds_left))} left")
    return ", ".join(parts)


def _step(status: Status) -> str:
    if not status.step:
        return f"0 of {status.steps}" if status.steps else "none yet"
    parts = [f"{status.step} of {status.steps}" if status.steps else str(status.step), ago(status.step_age_s)]
    shown = (("reward/mean", "reward {:.3f}"), ("time/tokens_per_s", "{:,.0f} tokens/s"))
    parts += [form.format(value) for name, form in shown if (value := status.metrics.get(name)) is not None]
    seconds = status.metrics.get("time/step_s")
    if seconds and status.steps and status.steps > status.step:
        parts.append(f"{clock((status.steps - status.step) * seconds)} to go at {seconds:.1f} s a step")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """Return a duration as H:MM:SS."""
    return str(timedelta(seconds=round(seconds)))


def ago(seconds: float | None) -> str:
    """Return an age as text, rounded to its largest unit."""
    if seconds is None:
        return "at an unknown time"
    for size, name in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} s ago"
