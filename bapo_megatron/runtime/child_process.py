"""A child process that answers questions, and that can be given up at any time.

Questions and answers are lines of JSON. The child has a session of its own, so that it can be ended with all
its children and Ctrl-C is for the run alone. It ends when the run does, however that ends (lifeline.py).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST_ANSWER = 256 << 20
"""Bytes of a line; more is a child out of control."""


class ChildError(Exception):
    """The child gave no answer."""


class ChildDied(ChildError):
    """It ended instead of answering."""


class ChildTimeout(ChildError):
    """It did not answer in time."""


def spread(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for a Python child that shall import what this process can."""
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Child:
    """One process. One question at a time; another thread may kill it meanwhile."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path | None = None,
        quiet: bool = False,
    ) -> None:
        """Start it. The number of its lifeline's descriptor is its last argument; ``quiet`` hides stderr."""
        lifeline_end, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(lifeline_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                env=dict(environment),
                cwd=directory,
                bufsize=0,
                pass_fds=(lifeline_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline_end)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._closing = threading.Lock()
        self.pid = self._process.pid

    def ask(self, question: object, limit_s: float) -> Any:
        """The answer. Raises ChildTimeout or ChildDied; a child that raised must be closed."""
        deadline = time.monotonic() + limit_s
        self._write(json.dumps(question).encode() + b"\n", deadline)
        line = self._read_line(deadline)
        try:
            return json.loads(line)
        except ValueError as error:
            raise ChildDied(f"it answered no JSON: {line[:200]!r}") from error

    def wait_end(self, limit_s: float) -> str | None:
        """How it ended, or None if it has not in time.

        It is not collected: until ``close`` does, its process group, which that kills, can be no other's.
        """
        deadline = time.monotonic() + limit_s
        while True:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if end is not None:
                killed = end.si_code != os.CLD_EXITED
                return (
                    f"signal {signal.Signals(end.si_status).name}" if killed else f"exit code {end.si_status}"
                )
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)

    def kill(self) -> None:
        """End it and its process group; whoever waits for its answer is told."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, collect it, and release what it held here."""
        with self._closing:
            if not self._stdin.closed:
                self.kill()
                self._process.wait()
                self._stdin.close()
                self._stdout.close()
                os.close(self._lifeline)

    def _write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            self._wait(self._stdin.fileno(), select.POLLOUT, deadline)
            try:
                left = left[os.write(self._stdin.fileno(), left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ChildDied(self._how_it_ended()) from None

    def _read_line(self, deadline: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        while not parts or not parts[-1].endswith(b"\n"):
            self._wait(self._stdout.fileno(), select.POLLIN, deadline)
            part = os.read(self._stdout.fileno(), 1 << 20)
            size += len(part)
            if not part:
                raise ChildDied(self._how_it_ended())
            if size > LONGEST_ANSWER:
                raise ChildDied(f"it answered more than {LONGEST_ANSWER} bytes")
            parts.append(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        ready = select.poll()
        ready.register(descriptor, event)
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ChildTimeout

    def _how_it_ended(self) -> str:
        return self.wait_end(1.0) or "it closed its pipe"
