"""Child processes with a deadline, for programs of this package and commands of users.

``AnsweringChild.ask`` sends a request and returns the reply, ``run_command`` runs a program to its end,
``within`` calls a function in a fork; these block up to a limit given by the caller. ``UserCommand`` starts a
user's command and does not wait. Any thread may kill a ``ChildProcess`` at any time. No child outlives this
process, even after ``kill -9`` (processes.py).

User commands (`checkpoint.after_export`, `logging.on_event`) are split into words as in a shell, but run
without one: no value of a run (a folder, an event) is ever interpreted as shell code. For pipes, variables
and `&&`, use ``bash -c '...'``.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

from bapo_megatron.runtime import processes

T = TypeVar("T")

_ENDING_S = 1.0
"""Wait limit for a killed fork of ``within``, seconds; a hanging file system may hold it longer."""

MAX_ANSWER_BYTES = 256 << 20
"""Size limit of one output line of a child, bytes; a longer line counts as the child's death."""

WATCH_S = 0.1
"""Interval of ``watch`` calls in ``AnsweringChild.ask``, seconds."""

_UNKILLABLE_S = 5.0
"""Wait limit for a killed child, seconds; one in an uninterruptible call (a hung disk) is left behind."""


NO_END = "no end within"
"""Beginning of the failure of a command that was killed at its deadline."""


class ChildError(Exception):
    """Base of ``AnsweringChild.ask`` errors: the child gave no valid answer and must be closed."""


class ChildDied(ChildError):
    """Raised when a child, or a fork of ``within``, dies without an answer, or answers invalid JSON."""


class ChildTimeout(ChildError):
    """Raised when a child misses the deadline; it still runs and must be closed."""


class NoAnswer(TimeoutError):
    """Raised when ``within`` times out; the forked process has been killed."""


_USERS_PATH = "BAPO_USERS_PYTHONPATH"
"""Variable for a child that gets this process's import path: the user's own PYTHONPATH, perhaps empty."""


def with_import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for a Python child, with this process's import path as PYTHONPATH."""
    users = environment.get(_USERS_PATH, environment.get("PYTHONPATH", ""))
    ours = os.pathsep.join(path for path in sys.path if path)
    return {**environment, "PYTHONPATH": ours, _USERS_PATH: users}


def with_users_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for a user's program, with ``with_import_path`` undone: another interpreter
    would import our packages before its own."""
    users = environment.get(_USERS_PATH, environment.get("PYTHONPATH"))
    rest = {name: value for name, value in environment.items() if name not in (_USERS_PATH, "PYTHONPATH")}
    return {**rest, "PYTHONPATH": users} if users else rest


def start_module(module: str, *arguments: str, **popen: Any) -> subprocess.Popen[Any]:
    """Start ``python -m module`` with this process's import path, and in its own session: Ctrl-C is for this
    process's group. ``popen``: more arguments of subprocess.Popen. Raises OSError if it cannot be started."""
    command, environment = [sys.executable, "-m", module, *arguments], with_import_path(os.environ)
    return subprocess.Popen(command, env=environment, **{"start_new_session": True, **popen})


def end_modules(processes: Collection[subprocess.Popen[bytes]], line: bytes, limit_s: float) -> None:
    """Write the last ``line`` to the pipe of each process; wait ``limit_s`` for all, then kill the rest."""
    deadline = time.monotonic() + limit_s
    for process in processes:  # to all first: they end concurrently
        assert process.stdin is not None
        with suppress(OSError), process.stdin:  # it has ended
            process.stdin.write(line)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


class ChildProcess:
    """Child process in its own session: signals to this process's group, such as Ctrl-C, do not reach it. The
    constructor starts it; ``wait_end`` waits up to a limit. Always call ``close``: it kills and reaps the
    child and closes the pipes."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], guarded: bool, **popen: Any
    ) -> None:
        """Start it, from any thread. Raises OSError if it cannot be started.

        ``guarded``: run it under ``processes.guard``, which ends its descendants with it. Otherwise it is a
        program of this package: its last argument is its lifeline's descriptor, which it must first pass to
        ``die_with_parent``. ``popen``: more arguments of subprocess.Popen.
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
        """Return its exit code, negative for a signal; None if it has not ended in time. The zombie stays
        until ``close``, so the kernel cannot reuse its process group id, which ``close`` kills."""
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
        """Kill it, its process group and, if guarded, its descendants."""
        if self._guarded and self.process.poll() is None:
            # Descendants first: without the guardian they cannot be found.
            processes.kill_descendants(self.pid, _UNKILLABLE_S)
            self.process.send_signal(signal.SIGCONT)  # a stopped guardian could not reap them
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
    """Child process that answers requests, one at a time: ``ask`` writes a line of JSON to its standard input
    and returns the JSON line of its standard output. ``ask`` blocks and raises ChildTimeout or ChildDied.
    Another thread may ``kill`` the child during a request."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path | None = None,
        quiet: bool = False,
    ) -> None:
        """Start it in ``directory``; ``quiet`` hides its stderr."""
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
        """Return the reply to ``question``. Raises ChildTimeout or ChildDied; the child must then be closed.
        Calls ``watch`` every `WATCH_S` until the reply comes; its exceptions end the wait."""
        deadline = time.monotonic() + limit_s
        self._write(json.dumps(question).encode() + b"\n", deadline)
        line = self._read_line(deadline, watch)
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChildDied(f"it answered no JSON: {line[:200]!r}") from error

    def end_questions(self) -> None:
        """Close its standard input; a child that waits for a request then ends by itself."""
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
    """Result of ``run_command``: stdout, stderr, exit code, and in words how the command failed."""

    output: str
    errors: str
    ended: str
    """Empty on success, otherwise the failure, e.g. `exit code 1` or `no end within 60 s`."""
    code: int | None = None
    """Exit code, negative for a signal; None if not started or killed at the deadline."""

    def reason(self) -> str:
        """Return a failure in one line: how it ended, and the last line of its stderr."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return f"{self.ended}: {lines[-1]}" if lines else self.ended


def run_command(
    command: Sequence[str], deadline_s: float, environment: Mapping[str, str] | None = None
) -> CommandResult:
    """Run ``command`` and return its result; kill it and its descendants after ``deadline_s``. Never raises.

    ``environment``: None for this process's. Output goes to files: a grandchild could keep a pipe open and
    block.
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
            ended = f"{NO_END} {deadline_s:g} s"
        else:
            ended = exit_text(code).replace("signal", "ended by") if code else ""
        return CommandResult(_text(output), _text(errors), ended, code)


def run_module(module: str, arguments: Sequence[str], deadline_s: float) -> CommandResult:
    """Call ``run_command`` with this interpreter and ``-m module``."""
    return run_command([sys.executable, "-m", module, *arguments], deadline_s)


def exit_text(code: int) -> str:
    """Return an exit code in words: `exit code 1`, or `signal SIGKILL` for -9."""
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Call ``work`` in a fork; return its result or raise its error, or NoAnswer after ``limit_s`` seconds.

    Raises ChildDied if the fork ends without an answer. A thread that waits for a hanging file system could
    not be ended. Result and error are pickled. ``work`` must need no lock that another thread may hold.
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
            os.kill(pid, signal.SIGKILL)  # ends once the file system lets it
            deadline = time.monotonic() + _ENDING_S
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                time.sleep(0.001)  # otherwise each such call would leave a zombie
            raise
    os.waitpid(pid, 0)
    if not done:
        raise result
    return result  # type: ignore[no-any-return]


def _work(pipe: Connection, work: Callable[[], Any]) -> None:
    """Body of the forked process; never returns."""
    try:
        processes.die_with_parent()
        try:
            answer = pickle.dumps((True, work()))
        except Exception as error:  # also pickle's: some values cannot travel
            answer = pickle.dumps((False, error))
        pipe.send_bytes(answer)
    finally:
        os._exit(1)


_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Launcher variables withheld from commands, which they would turn into a waiting rank."""

_TAIL_BYTES = 4096
_MOST_REASON = 300


def command_words(command: str) -> list[str]:
    """Return a command's words. Raises ValueError if it has none, or an open quote."""
    if not (words := shlex.split(command)):
        raise ValueError("it is empty")
    return words


def missing_program(command: str) -> str | None:
    """Return an error if a command's program is not on this machine; None if it can be started."""
    program = command_words(command)[0]
    return None if shutil.which(program) else f"there is no program {program} that can be run"


class UserCommand:
    """Running user command in its own session, with its output in a log. The constructor starts it without
    waiting; ``wait`` returns the exit code, or None while it runs; then call ``close``. Its descendants end
    with it, and all end with this process."""

    def __init__(
        self, words: list[str], about: Mapping[str, str], log: Path, stdin: bytes = b"", append: bool = False
    ) -> None:
        """Start it. Raises OSError on failure. ``about``: additional environment variables."""
        inherited = with_users_path(os.environ).items()
        ours = {name: value for name, value in inherited if name not in _LAUNCHERS}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with tempfile.TemporaryFile() as input_file, log.open("ab" if append else "wb") as output:
            input_file.write(stdin)
            input_file.seek(0)
            self._child = ChildProcess(
                words, {**ours, **about}, True, stdin=input_file, stdout=output, stderr=output
            )

    def wait(self, limit_s: float) -> int | None:
        """Return its exit code; None if it still runs after ``limit_s`` seconds."""
        return self._child.wait_end(limit_s)

    def failure(self, code: int | None, limit: str) -> str:
        """Return a failure in one line: the exit (``code`` None: no end in ``limit``) and the last output."""
        ended = f"{NO_END} {limit}" if code is None else exit_text(code)
        last = _last_line(self._log)
        return f"{ended}: {last}"[:_MOST_REASON] if last else ended

    def close(self) -> None:
        self._child.close()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
