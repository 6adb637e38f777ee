"""Commands that are forked from a process that has imported everything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import forked_commands
from tests.support.forked_commands import ROOT, ForkedCommand, start_bapo

pytestmark = pytest.mark.integration
DEADLINE_S = 900


def endless(run_dir: Path) -> ForkedCommand:
    return start_bapo("train", "recipes/demo_cpu.py", "--steps=9999", f"--run-dir={run_dir}")


def test_another_copy_of_the_project_has_its_own_server(tmp_path: Path) -> None:
    """One that inherits the session's variable would run this copy's code."""
    ours, theirs = (forked_commands._name("session", root) for root in (ROOT, tmp_path))
    assert ours != theirs
    assert ours == forked_commands._name("session", ROOT) != forked_commands._name("another", ROOT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        assert forked_commands._listens(listener, theirs)


def imported_by(command: psutil.Process) -> int:
    """The process that has imported what the command's own server is a fork of."""
    return int(command.parents()[1].pid)


@pytest.mark.slow
def test_it_ends_with_its_test_process_and_no_other(tmp_path: Path) -> None:
    """All of a session are forks of one process."""
    ours = endless(tmp_path / "ours")
    code = (
        "import sys; from tests.support.forked_commands import start_bapo\n"
        f"flags = ('train', 'recipes/demo_cpu.py', '--steps=9999', '--run-dir={tmp_path / 'run'}')\n"
        "print(start_bapo(*flags).pid, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as test:
        assert test.stdout is not None
        command = psutil.Process(int(test.stdout.readline()))
        assert imported_by(command) == imported_by(psutil.Process(ours.pid))
        assert command.ppid() != psutil.Process(ours.pid).ppid()
        os.kill(test.pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while command.is_running() and command.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ours.poll() is None
    os.killpg(ours.pid, signal.SIGKILL)
