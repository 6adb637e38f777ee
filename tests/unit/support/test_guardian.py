"""What a test session starts ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.guardian import unguarded

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300
SESSION = """
import subprocess, sys
from tests.support.guardian import guard_session, unguarded
guard_session()
for environment in (None, unguarded()):
    child = subprocess.Popen(["sleep", "3600"], env=environment, start_new_session=True)
    print(child.pid, flush=True)
sys.stdin.read()
"""


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_session_leaves_nothing_but_what_it_has_let_go(end: signal.Signals | None) -> None:
    """Killed, told to end, or at its own end. The children have sessions of their own."""
    command = [sys.executable, "-c", SESSION]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=unguarded(), text=True, **pipes) as session:
        assert session.stdout is not None
        guarded, let_go = (psutil.Process(int(session.stdout.readline())) for _ in range(2))
        assert not is_gone(guarded)
        if end is not None:
            os.kill(session.pid, end)
        assert session.stdin is not None
        session.stdin.close()
        deadline = time.monotonic() + DEADLINE_S
        while not is_gone(guarded):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not is_gone(let_go)
        let_go.kill()
