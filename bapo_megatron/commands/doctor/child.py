"""Work that may hang, crash or never return, kept away from this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Child:
    """How a child process ended, and what it said."""

    output: str
    errors: str
    ended: str
    """Empty if it ended well; else how it did not, e.g. `exit code 1` or `no end within 60 s`."""
    code: int | None = None
    """Exit code; None if it was not started, or killed."""

    def reason(self) -> str:
        """Why it failed, in one line: the last that it printed, or how it ended."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return f"{self.ended}: {lines[-1]}" if lines else self.ended


def run_child(
    command: Sequence[str], deadline_s: float, environment: Mapping[str, str] | None = None
) -> Child:
    """Run ``command`` to its end, or kill it and its children after ``deadline_s`` seconds. Never raises.

    Output goes through files: a grandchild that holds a pipe open would be waited for.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            return Child("", "", f"{command[0]} cannot be started: {error.strerror or error}")
        try:
            code: int | None = process.wait(deadline_s)
            ended = _ending(process.returncode)
        except subprocess.TimeoutExpired:
            code, ended = None, f"no end within {deadline_s:g} s"
        finally:
            _kill(process)
        return Child(_text(output), _text(errors), ended, code)


def run_module(module: str, arguments: Sequence[str], deadline_s: float) -> Child:
    """Run a module of this package with this interpreter."""
    return run_child(
        [sys.executable, "-m", f"bapo_megatron.commands.doctor.{module}", *arguments], deadline_s
    )


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of ``work``, done in a thread, which is left behind with a TimeoutError if it is late."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again by the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]


def one_line(error: object, limit: int = 200) -> str:
    """An error as one short line, with its type where it says nothing itself."""
    named = " ".join(str(error).split()) or type(error).__name__
    return named if len(named) <= limit else f"{named[: limit - 1]}…"


def _ending(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _kill(process: subprocess.Popen[Any]) -> None:
    """End what is left of its session. One that the kernel does not let go of is left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _text(file: Any) -> str:
    file.seek(0)
    return bytes(file.read()).decode(errors="replace")
