"""Child processes with a deadline: one that answers questions, a command run to its end, a call in a fork.

Each can be given up at any time, and ends when this process does, however that ends (processes.py).
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

from bapo_megatron.runtime import processes

T = TypeVar("T")

MAX_ANSWER_BYTES = 256 << 20
"""Most bytes of one line of a child's output; more means that the child is out of control."""

_UNKILLABLE_S = 5.0
"""How long a killed child is waited for. One that the kernel does not let go of (a file system that hangs) is
left behind."""


class ChildError(Exception):
    """The child gave no answer."""


class ChildDied(ChildError):
    """The child ended instead of answering."""


class ChildTimeout(ChildError):
    """The child did not answer in time."""


class NoAnswer(TimeoutError):
    """A call was not done within its time."""


def with_import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with a PYTHONPATH by which a Python child finds what this process can import."""
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class ChildProcess:
    """A process in a session of its own: signals to this process's group, as Ctrl-C, are not for it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], guarded: bool, **popen: Any
    ) -> None:
        """Start it from any thread. OSError if that cannot be.

        ``guarded``: it runs under ``processes.guard``, so that all that it starts ends with it. Else it is a
        program of ours, which has the descriptor of its lifeline as its last argument, and must pass it to
        ``die_with_parent`` first. ``popen``: more arguments of subprocess.Popen.
        """
        if guarded and shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        self._guarded = guarded
        self._closing = threading.Lock()
        self._is_closed = False
        lifeline, self._lifeline = os.pipe()
        try:
            guardian = (sys.executable, "-I", "-S", processes.__file__, str(lifeline)) if guarded else ()
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [*guardian, *command, *(() if guarded else (str(lifeline),))],
                env=dict(environment),
                pass_fds=(lifeline,),
                start_new_session=True,
                **popen,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        self.pid = self.process.pid

    def wait_end(self, limit_s: float) -> int | None:
        """Its exit code, negative for a signal; None if it has not ended in time.

        It is not collected: until ``close`` does, its process group, which that kills, can be no other's.
        """
        deadline, pause_s = time.monotonic() + limit_s, 0.002
        while True:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if end is not None:
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            if time.monotonic() > deadline:
                return None
            time.sleep(pause_s)
            pause_s = min(0.05, 1.2 * pause_s)

    def kill(self) -> None:
        """End it and its process group, and, if it is guarded, all that it has started."""
        if self._guarded and self.process.poll() is None:
            processes.kill_descendants(self.pid, _UNKILLABLE_S)
            self.process.send_signal(
                signal.SIGCONT
            )  # if it was stopped: the guardian collects them, and ends
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_UNKILLABLE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, collect it, and release what it held here."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_UNKILLABLE_S)
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
            os.close(self._lifeline)


class AnsweringChild(ChildProcess):
    """A child that answers questions, one line of JSON each way. One question at a time; another thread may
    kill it meanwhile."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path | None = None,
        quiet: bool = False,
    ) -> None:
        """Start it in ``directory``; ``quiet`` hides what it writes to stderr."""
        pipe, error = subprocess.PIPE, subprocess.DEVNULL if quiet else None
        super().__init__(
            command, environment, False, cwd=directory, stdin=pipe, stdout=pipe, stderr=error, bufsize=0
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        for stream in (self._stdin, self._stdout):
            os.set_blocking(stream.fileno(), False)

    def ask(self, question: object, limit_s: float) -> Any:
        """The answer. Raises ChildTimeout or ChildDied; a child that raised must be closed."""
        deadline = time.monotonic() + limit_s
        self._write(json.dumps(question).encode() + b"\n", deadline)
        line = self._read_line(deadline)
        try:
            return json.loads(line)
        except ValueError as error:
            raise ChildDied(f"it answered no JSON: {line[:200]!r}") from error

    def end_questions(self) -> None:
        """Close its standard input, by which a child that waits for a question ends."""
        self._stdin.close()

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
            if size > MAX_ANSWER_BYTES:
                raise ChildDied(f"it answered more than {MAX_ANSWER_BYTES} bytes")
            parts.append(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        ready = select.poll()
        ready.register(descriptor, event)
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ChildTimeout

    def _how_it_ended(self) -> str:
        code = self.wait_end(1.0)
        return "it closed its pipe" if code is None else exit_text(code)


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: its exit and its output."""

    output: str
    errors: str
    ended: str
    """Empty if it ended well; else how it did not, e.g. `exit code 1` or `no end within 60 s`."""
    code: int | None = None
    """Exit code, negative for a signal; None if it was not started, or killed at the deadline."""

    def reason(self) -> str:
        """Why the command failed, in one line: the last that it printed, or how it ended."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return f"{self.ended}: {lines[-1]}" if lines else self.ended


def run_command(
    command: Sequence[str], deadline_s: float, environment: Mapping[str, str] | None = None
) -> CommandResult:
    """Run ``command`` to its end, or kill it and all it started after ``deadline_s`` seconds. Never raises.
    ``environment``: None for this process's.

    Output goes through files: a grandchild that holds a pipe open would be waited for.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            nothing = subprocess.DEVNULL
            about = os.environ if environment is None else environment
            child = ChildProcess(command, about, True, stdin=nothing, stdout=output, stderr=errors)
        except OSError as error:
            return CommandResult("", "", f"{command[0]} cannot be started: {error.strerror or error}")
        try:
            code = child.wait_end(deadline_s)
        finally:
            child.close()
        if code is None:
            ended = f"no end within {deadline_s:g} s"
        else:
            ended = exit_text(code).replace("signal", "ended by") if code else ""
        return CommandResult(_text(output), _text(errors), ended, code)


def run_module(module: str, arguments: Sequence[str], deadline_s: float) -> CommandResult:
    """``run_command`` of this interpreter with ``-m module``."""
    return run_command([sys.executable, "-m", module, *arguments], deadline_s)


def exit_text(code: int) -> str:
    """`exit code 1`, or `signal SIGKILL` for -9."""
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """What ``work`` returns, or raises; NoAnswer after ``limit_s`` seconds. Result and error are pickled.

    It is done in a fork: a thread that waits for a file system that hangs could not be ended, and neither
    could its process. ``work`` must need no lock that another thread may hold.
    """
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        _work(theirs, work)
    theirs.close()
    with ours:
        try:
            if not ours.poll(limit_s):
                raise NoAnswer(f"no answer within {limit_s:g} s")
            done, result = pickle.loads(ours.recv_bytes())
        except EOFError:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            raise ChildDied(f"its process ended with {exit_text(code)}") from None
        except BaseException:
            os.kill(pid, signal.SIGKILL)  # it ends when the file system lets it
            os.waitpid(pid, os.WNOHANG)
            raise
    os.waitpid(pid, 0)
    if not done:
        raise result
    return result  # type: ignore[no-any-return]


def _work(pipe: Connection, work: Callable[[], Any]) -> None:
    """The fork's life; it never returns."""
    try:
        processes.die_with_parent()
        try:
            answer = pickle.dumps((True, work()))
        except Exception as error:  # also of pickle: some values cannot travel
            answer = pickle.dumps((False, error))
        pipe.send_bytes(answer)
    finally:
        os._exit(1)
