"""Exit codes of commands, the message of an error that a user can fix, and handlers of stop signals.

``report_error``, called by ``cli.run`` and by each rank, prints the message on stderr, kills this process's
multiprocessing children and returns the exit code: 2 wrong input (ConfigError), 3 stopped run or full disk
(RunStopped), 4 failing storage, 85 preempted. The caller then passes it to ``exit_process``, which uses
os._exit if ``skip_teardown`` was called, since destroying an NCCL group can hang.

``handling(handler)`` is a context manager in which the stop signals, SIGUSR1 and SIGTERM (Slurm's) and SIGHUP
(a closed terminal), call ``handler`` in the main thread. Slurm sends signals to all processes of a job; the
trainer handles them, and its children call ``ignore_signals``.

Imports nothing heavy: a command handles signals before it has loaded anything.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed, printable
from bapo_megatron.runtime.storage import comes_of_failing_disk

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)

_skips_teardown = False


def skip_teardown() -> None:
    """Make ``exit_process`` call os._exit, without teardown of process groups. Destroying an NCCL group can
    hang if another rank never joins in."""
    global _skips_teardown
    _skips_teardown = True


def skips_teardown() -> bool:
    """Whether ``skip_teardown`` was called."""
    return _skips_teardown


def exit_process(code: int) -> NoReturn:
    """Exit with sys.exit, or with os._exit after ``skip_teardown``."""
    if _skips_teardown:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def is_raised_on_all_ranks(error: BaseException) -> bool:
    """Whether every rank raises this type of error together, so that only rank 0 prints it."""
    return type(error) in (Preempted, RunStopped, StorageFailed)


def report_error(error: ConfigError | Preempted | RunStopped, prints: bool = True) -> int:
    """Print an error on stderr, kill multiprocessing children and flush; return the error's exit code, 4 also
    for a ConfigError that a failing disk caused. ``prints``: False if another rank prints the message."""
    # First: a process that writes a checkpoint may wait forever to return its result, and the interpreter
    # would wait for it at exit.
    for child in multiprocessing.active_children():
        child.kill()
    # A file also "cannot be read" while its server is away: code 4 requeues a job, code 2 stops it for good.
    wrong = isinstance(error, ConfigError)
    fails = isinstance(error, StorageFailed) or (wrong and comes_of_failing_disk(error))
    wrong = wrong and not fails
    text = f"error: {error}" if wrong else f"stopped: {error}\nthe same command continues the run"
    with suppress(OSError):
        if prints:
            print(printable(text), file=sys.stderr, flush=True)
    # A log on a full disk takes no more text. Buffered text would fail at the interpreter's exit and change
    # the exit code to 120.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if wrong:
        return 2
    if isinstance(error, Preempted):
        return 85
    return 4 if fails else 3


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context manager: call ``handler`` for each of ``SIGNALS`` instead of ending this process. An ignored
    SIGHUP stays ignored, as under nohup. After a SIGHUP, output goes to /dev/null: the terminal is gone."""

    def handle(number: int, frame: FrameType | None) -> None:
        handler(number, frame)
        if number == signal.SIGHUP:
            leave_terminal()

    before = {}
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Context manager: a child started in it receives no stop signal until it calls ``ignore_signals``. A
    signal during its imports would end it. Signals to this thread are held back meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore the stop signals and Ctrl-C in this process, a child of the trainer, from now on."""
    for number in (*SIGNALS, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # commands inherit SIG_IGN but not a handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def leave_terminal() -> None:
    """Redirect stdout and stderr to /dev/null if they are a terminal or a pipe. After a hangup every write to
    the terminal fails, and to a pipe, too, if its reader (``tee``) has ended."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def stop_at_once(number: int, _frame: FrameType | None) -> None:
    """Signal handler before a run's first step, with nothing to save: exit immediately with 85."""
    name = signal.Signals(number).name
    text = f"stopped: told to stop by {name} before the run began\nthe same command continues the run\n"
    with suppress(OSError):
        os.write(2, text.encode())
    os._exit(85)
