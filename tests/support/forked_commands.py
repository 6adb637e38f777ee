"""``bapo`` commands for tests, forked from a process that has imported everything (fork_server.py).

For tests that do not ask how an interpreter starts. What ``start_bapo("train", ...)`` returns is used like
``subprocess.Popen``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.support.guardian import VARIABLE

ROOT = Path(__file__).parents[2]
_ENVIRONMENT = dict(os.environ)
"""As it is before any test changes it."""


class ForkedCommand:
    """A running command: the part of ``subprocess.Popen[bytes]`` that tests use. Its session is its own."""

    def __init__(self, arguments: tuple[str, ...], told: socket.socket, output: int) -> None:
        self.args = ("bapo", *arguments)
        self._stop_signals, self._output = told, output
        self._read: list[bytes] = []
        self.pid = int(self._next_number())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        if self.returncode is None and select.select([self._stop_signals], [], [], 0)[0]:
            self.returncode = self._next_number()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended; TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None and not select.select([self._stop_signals], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        """SIGKILL to the command alone, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[bytes, None]:
        """All that it and its children have written, when they have ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._output >= 0:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0, b"".join(self._read))
            self._read.append(part := os.read(self._output, 1 << 16))
            if not part:
                os.close(self._output)
                self._output = -1
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return b"".join(self._read), None

    def _next_number(self) -> int:
        message = self._stop_signals.recv(32)
        if not message:
            raise RuntimeError(f"the fork server has ended, and {self.args} with it")
        return int(message)


def start_bapo(*arguments: str | Path, directory: Path = ROOT, log: int | None = None) -> ForkedCommand:
    """Start ``bapo ARGUMENTS`` with this process's environment. ``log``: a file that its output goes to."""
    return _start(server(), tuple(map(str, arguments)), directory, log)


def run_python(code: str) -> tuple[int, str]:
    """Run a program that needs torch; its exit code, and what it has written to both outputs."""
    program = start_bapo("-c", code)
    output = program.communicate(timeout=900)[0].decode()
    return program.wait(), output


def _start(
    to: socket.socket, words: tuple[str, ...], directory: Path, log: int | None, source: str = ""
) -> ForkedCommand:
    request = {"arguments": words, "directory": str(directory), "environment": dict(os.environ)}
    told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, written = os.pipe() if log is None else (-1, os.dup(log))
    message = json.dumps({**request, "source": source}).encode()
    socket.send_fds(to, [message], [written, theirs.fileno()])
    theirs.close()
    os.close(written)
    return ForkedCommand(words, told, output)


def forking() -> dict[str, str]:
    """The environment of a program whose ``python -m bapo_megatron.cli`` are forked (at_start)."""
    server()  # else the first of them would start it, and it would hold the program's output open
    path = filter(None, (str(Path(__file__).with_name("at_start")), os.environ.get("PYTHONPATH")))
    return {**os.environ, "BAPO_TEST_FORKS": "yes", "PYTHONPATH": os.pathsep.join(path)}


def put_bapo_into(folder: Path, source: Path) -> None:
    """Write a program ``bapo`` that has the fork server run that of the project's copy in ``source``.

    For shells that inherit the descriptor of ``server``. Both outputs of a command go to the shell's first.
    """
    folder.mkdir()
    script = folder / "bapo"
    script.write_text(
        f"#!{sys.executable} -SE\n"
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.support.forked_commands import forward\n"
        f"sys.exit(forward({server().fileno()}, {str(source)!r}, sys.argv[1:]))\n"
    )
    script.chmod(0o755)


def forward(descriptor: int, source: str, arguments: list[str]) -> int:
    """Run a command of the copy in ``source`` by the fork server at ``descriptor``; its exit code."""
    command = _start(socket.socket(fileno=descriptor), tuple(arguments), Path.cwd(), 1, source)
    return command.wait()


@cache
def server() -> socket.socket:
    """The connection of this process to the fork server, which ends its commands when the socket closes.

    The processes of a test session share what one server imports; whoever asks first starts it.
    """
    session = os.environ.get(VARIABLE)
    name, kind = _name(session or secrets.token_hex(8), ROOT), "shared" if session else "own"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            if _listens(listener, name):
                words = ("-m", "tests.support.fork_server", str(listener.fileno()), kind)
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", *words],
                    cwd=ROOT,
                    env=_ENVIRONMENT | ({VARIABLE: session} if session else {}),
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                )
        with suppress(ConnectionRefusedError):  # it does not listen yet, or has just ended
            ours.connect(name)
            return ours
        time.sleep(0.01)


def _name(session: str, root: Path) -> str:
    """Of the server's socket. A test of another copy of the project may have the session's variable, too."""
    return f"\0bapo-fork-server-{session}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}"


def _listens(listener: socket.socket, name: str) -> bool:
    """Let it listen under the name; False if another process has the name."""
    try:
        listener.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    listener.listen()
    return True
