"""The processes of a run, for tests that harm them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.forked_sampler import SAMPLER, STANDBY


def heed_signals() -> None:
    """Popen's ``preexec_fn`` for a test that sends SIGINT or SIGHUP: where the tests run in the background (a
    shell's ``&``, nohup) they are ignored, which children inherit."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def keep_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the exports of runs keep their priority: with the lowest one takes minutes beside other tests."""
    monkeypatch.setenv("BAPO_TEST_KEEPS_PRIORITY", "yes")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("at_start")))


def servers_of(run_dir: Path) -> list[psutil.Process]:
    """Processes whose output goes to the log of one of the run's servers."""
    logs = {str(path) for path in (run_dir / "logs").glob("server-*.log")}
    found = []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1") in logs and process.status() != "zombie":
                found.append(process)
        except OSError:
            continue
    return found


def sampler_of(pid: int) -> psutil.Process | None:
    """The process that samples beside rank 0 of the run whose first process is ``pid``."""
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "bapo_megatron.rollout.sampler.process" in child.cmdline() or _name(child) == SAMPLER:
                return child
        except (psutil.Error, OSError):  # it has just ended
            continue
    return None


def environments_of(pid: int, program: str = "bapo_megatron.environment.worker") -> list[psutil.Process]:
    """The workers of environments of the run whose first process is ``pid``, or another program of its."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if program in child.cmdline():
                found.append(child)
        except (psutil.Error, OSError):  # it has just ended
            continue
    return found


def ranks_of(pid: int) -> list[psutil.Process]:
    """The training processes of the command ``pid``, by rank: its forks have its command line."""
    command = psutil.Process(pid).cmdline()
    found = [c for c in psutil.Process(pid).children() if c.cmdline() == command]
    return sorted((c for c in found if _name(c) not in (STANDBY, SAMPLER)), key=lambda c: c.pid)


def _name(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text().strip()
