"""The guardian of a test session: a process that ends what the session leaves behind, however it ends.

Servers have sessions of their own, Slurm's daemons leave their parents, and pytest may be killed with -9:
what belongs to a session is known by a variable in its environment, which every process that it starts
inherits.

    python tests/support/guardian.py PID NAME      # waits for the process PID, then ends the session NAME
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "BAPO_TEST_SESSION"
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_QUIET_S = 0.5
"""How long no process of the session may be seen before it counts as ended: one may be just starting."""


def guard_session() -> None:
    """Start the guardian of this process, unless it belongs to a session that has one (a worker of xdist)."""
    if VARIABLE in os.environ:
        return
    name = secrets.token_hex(8)
    command = [sys.executable, __file__, str(os.getpid()), name]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    os.environ[VARIABLE] = name


def unguarded() -> dict[str, str]:
    """The environment of a process that shall outlive the session, because it repairs something."""
    return {name: value for name, value in os.environ.items() if name != VARIABLE}


def members(name: str) -> list[int]:
    """Processes of the session, but for those that only wait to be collected."""
    mark = f"{VARIABLE}={name}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _wait_for_the_end_of(pid: int) -> None:
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        select.select([ended], [], [])


def main() -> None:
    pid, name = int(sys.argv[1]), sys.argv[2]
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _wait_for_the_end_of(pid)
    last_seen = time.monotonic()
    while time.monotonic() - last_seen < _QUIET_S:
        for member in members(name):
            last_seen = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
