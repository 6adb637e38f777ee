"""Exit codes of the command line: how an error that a user can mend becomes one message and a number."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from typing import NoReturn

from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed, printable

_at_once = False


def leave_at_once() -> None:
    """Have ``leave`` end this process without taking anything down, which may wait for ever."""
    global _at_once
    _at_once = True


def must_leave_at_once() -> bool:
    """Whether ``leave`` was told so."""
    return _at_once


def leave(code: int) -> NoReturn:
    """End this process with an exit code."""
    if _at_once:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def is_known_to_all(error: BaseException) -> bool:
    """Whether an error is raised on every rank together, so that one tells it."""
    return type(error) in (Preempted, RunStopped, StorageFailed)


def end_with(error: ConfigError | Preempted | RunStopped, say: bool = True) -> int:
    """The exit code of an error: 2 wrong input, 3 full disk or stopped run, 4 failing storage, 85 preempted.

    Prints the message on stderr, unless ``say`` is False (another rank says it).

    A log on a full disk takes no message, and what is left in a buffer would change the exit code. Processes
    that write a checkpoint may wait for ever to tell their results, and this one would wait for them.
    """
    for child in multiprocessing.active_children():
        child.kill()
    wrong = isinstance(error, ConfigError)
    text = f"error: {error}" if wrong else f"stopped: {error}\nthe same command continues the run"
    with suppress(OSError):
        if say:
            print(printable(text), file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if wrong:
        return 2
    if isinstance(error, Preempted):
        return 85
    return 4 if isinstance(error, StorageFailed) else 3
