"""Child processes with a deadline: requests and replies, a command to its end, a fork, a user's command.

All calls block, up to a limit that the caller gives. A child can be killed at any time, from any thread, and
none outlives this process, also after ``kill -9`` (processes.py).

A command of the user (`checkpoint.after_export`, `logging.on_event`) is split into words as a shell does it,
and run without a shell: no value of a run (a folder, an event) is ever read as shell code. For pipes,
variables and `&&`: ``bash -c '...'``.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import select
import shlex
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

_ENDING_S = 1.0
"""Limit of the wait for a killed fork of ``within``; a file system that hangs keeps it for longer."""

MAX_ANSWER_BYTES = 256 << 20
"""Limit of one line of a child's output, in bytes; a longer one counts as the child's death."""

WATCH_S = 0.1
"""Pause between two calls of the ``watch`` of ``AnsweringChild.ask``."""

_UNKILLABLE_S = 5.0
"""Limit of the wait for a killed child. One in an uninterruptible call (a file system that hangs) is left
behind."""


class ChildError(Exception):
    """Base of the errors of ``AnsweringChild.ask``: no answer from the child, which must then be closed."""


class ChildDied(ChildError):
    """Death of the child before its answer, or an answer that is not JSON; also of a process of
    ``within``."""


class ChildTimeout(ChildError):
    """Deadline passed before the child's answer; the child still runs, and must be closed."""


class NoAnswer(TimeoutError):
    """Timeout of ``within``, a call in a fork; the forked process has been killed."""


_USERS_PATH = "BAPO_USERS_PYTHONPATH"
"""Variable of a child with this process's import path: PYTHONPATH as the user has set it, perhaps empty."""


def with_import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment for a Python child: ``environment`` with this process's import path as PYTHONPATH."""
    users = environment.get(_USERS_PATH, environment.get("PYTHONPATH", ""))
    ours = os.pathsep.join(path for path in sys.path if path)
    return {**environment, "PYTHONPATH": ours, _USERS_PATH: users}


def with_users_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment for a user's program: ``with_import_path`` undone, whose standard library and packages
    another interpreter would import before its own."""
    users = environment.get(_USERS_PATH, environment.get("PYTHONPATH"))
    rest = {name: value for name, value in environment.items() if name not in (_USERS_PATH, "PYTHONPATH")}
    return {**rest, "PYTHONPATH": users} if users else rest


class ChildProcess:
    """Child process in a session of its own: signals to this process's group, as Ctrl-C, do not reach it.

    Started by the constructor, as by ``run_command``, worker processes and the agent programs of
    ``environment/adapters``. Call ``close`` in any case: it kills the child, reaps it and releases the pipes.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], guarded: bool, **popen: Any
    ) -> None:
        """Start it, from any thread. OSError if it cannot be started.

        ``guarded``: it runs under ``processes.guard``, which ends its descendants with it. Else it is a
        program of this package: it gets the descriptor of its lifeline as its last argument, and must pass it
        to ``die_with_parent`` first. ``popen``: more arguments of subprocess.Popen.
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

        The zombie stays until ``close``, so that the kernel cannot give its process group's number, which
        ``close`` kills, to another.
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
        """Kill it and its process group, and, if it is guarded, its descendants."""
        if self._guarded and self.process.poll() is None:
            # The descendants first: once the guardian is dead nothing leads to them any more.
            processes.kill_descendants(self.pid, _UNKILLABLE_S)
            self.process.send_signal(signal.SIGCONT)  # a stopped guardian could not reap them, and end
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_UNKILLABLE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
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
    """Request-reply child: one line of JSON each way, one request at a time.

    ``ask`` blocks and raises ChildTimeout or ChildDied. Another thread may ``kill`` it during a request. For
    sandboxes of code, math-verify, the generator of reasoning-gym and the traits of an environment.
    """

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

    def ask(self, question: object, limit_s: float, watch: Callable[[], None] | None = None) -> Any:
        """The reply to ``question``; ChildTimeout or ChildDied, after which the child must be closed.

        ``watch`` is called every `WATCH_S` until the reply comes; what it raises ends the wait.
        """
        deadline = time.monotonic() + limit_s
        self._write(json.dumps(question).encode() + b"\n", deadline)
        line = self._read_line(deadline, watch)
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChildDied(f"it answered no JSON: {line[:200]!r}") from error

    def end_questions(self) -> None:
        """Close its standard input, at which a child that waits for a request ends."""
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

    def _read_line(self, deadline: float, watch: Callable[[], None] | None) -> bytes:
        parts: list[bytes] = []
        size = 0
        while not parts or not parts[-1].endswith(b"\n"):
            self._wait(self._stdout.fileno(), select.POLLIN, deadline, watch)
            part = os.read(self._stdout.fileno(), 1 << 20)
            size += len(part)
            if not part:
                raise ChildDied(self._how_it_ended())
            if size > MAX_ANSWER_BYTES:
                raise ChildDied(f"it answered more than {MAX_ANSWER_BYTES} bytes")
            parts.append(part)
        return b"".join(parts)

    def _wait(
        self, descriptor: int, event: int, deadline: float, watch: Callable[[], None] | None = None
    ) -> None:
        ready = select.poll()
        ready.register(descriptor, event)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if ready.poll(1000 * (min(left_s, WATCH_S) if watch else left_s)):
                return
            if time.monotonic() >= deadline:
                raise ChildTimeout
            if watch:
                watch()

    def _how_it_ended(self) -> str:
        code = self.wait_end(1.0)
        return "it closed its pipe" if code is None else exit_text(code)


@dataclass(frozen=True)
class CommandResult:
    """Result of ``run_command``, as plain data: output, and how the command ended."""

    output: str
    errors: str
    ended: str
    """Empty if it succeeded; else how it failed, e.g. `exit code 1` or `no end within 60 s`."""
    code: int | None = None
    """Exit code, negative for a signal; None if it was not started, or killed at the deadline."""

    def reason(self) -> str:
        """Reason of a failure in one line: how it ended, with the last line of its stderr."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return f"{self.ended}: {lines[-1]}" if lines else self.ended


def run_command(
    command: Sequence[str], deadline_s: float, environment: Mapping[str, str] | None = None
) -> CommandResult:
    """Run ``command``; kill it and its descendants after ``deadline_s`` seconds. Never raises.

    ``environment``: None for this process's. Output goes through files: with pipes, a grandchild that keeps
    one open would have to be waited for.
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
    """Exit code in words: `exit code 1`, or `signal SIGKILL` for -9."""
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Call with a timeout, in a forked process: what ``work`` returns or raises; NoAnswer after ``limit_s``.

    ChildDied if the forked process ends without an answer. A thread that waits for a file system that hangs
    could not be ended, and neither could its process. Result and error are pickled. ``work`` must need no
    lock that another thread may hold.
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
            deadline = time.monotonic() + _ENDING_S
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                time.sleep(0.001)  # else each such call would leave a zombie while this process lives
            raise
    os.waitpid(pid, 0)
    if not done:
        raise result
    return result  # type: ignore[no-any-return]


def _work(pipe: Connection, work: Callable[[], Any]) -> None:
    """Body of the forked process; it never returns."""
    try:
        processes.die_with_parent()
        try:
            answer = pickle.dumps((True, work()))
        except Exception as error:  # also of pickle: some values cannot travel
            answer = pickle.dumps((False, error))
        pipe.send_bytes(answer)
    finally:
        os._exit(1)


_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Launcher variables, which a command does not get: they would make it a rank that waits for the others."""

_TAIL_BYTES = 4096
_MOST_REASON = 300


def command_words(command: str) -> list[str]:
    """The words of a command. ValueError if it has none, or an open quote."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"it cannot be split into words: {str(error).lower()}") from None
    if not words:
        raise ValueError("it is empty")
    return words


def missing_program(command: str) -> str | None:
    """Problem of a command's program on this machine; None if it can be started."""
    program = command_words(command)[0]
    if shutil.which(program) is not None:
        return None
    if os.sep in program:
        return f"{program} is not a program that can be run (chmod +x?)"
    return f"there is no program {program} on PATH"


class UserCommand:
    """Running user command, in a session of its own, with its output in a log.

    The constructor starts it and does not wait; poll or wait with ``wait``, then call ``close``. Its
    descendants end with it, and all end with this process.
    """

    def __init__(
        self, words: list[str], about: Mapping[str, str], log: Path, stdin: bytes = b"", append: bool = False
    ) -> None:
        """Start it. OSError if it cannot be started. ``about``: more environment variables for it."""
        ours = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with tempfile.TemporaryFile() as input_file, log.open("ab" if append else "wb") as output:
            input_file.write(stdin)
            input_file.seek(0)
            self._child = ChildProcess(
                words, {**ours, **about}, True, stdin=input_file, stdout=output, stderr=output
            )

    def wait(self, limit_s: float) -> int | None:
        """Its exit code; None if it still runs after ``limit_s`` seconds."""
        return self._child.wait_end(limit_s)

    def failure(self, code: int | None, limit: str) -> str:
        """Reason of a failure in one line: its exit (None: no end within ``limit``), and its last output."""
        ended = f"no end within {limit}" if code is None else exit_text(code)
        last = _last_line(self._log)
        return f"{ended}: {last}"[:_MOST_REASON] if last else ended

    def close(self) -> None:
        self._child.close()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
