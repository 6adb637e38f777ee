"""CPU time limits for a block of code, as context managers: ``cpu_limit`` raises, ``fatal_cpu_limit`` kills.

With a wall-clock limit, an honest answer on a busy or paused machine could time out and count as wrong.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(BaseException):
    """CPU time limit exceeded: raised within ``cpu_limit``, caught around it. A BaseException, so that a
    library's ``except Exception`` does not catch it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after ``seconds`` of CPU time, and again until the block ends. Repetition
    is needed where a bare ``except`` swallows the error. Has no effect outside of the main thread. Blocks
    must not nest: an inner one cancels the outer limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def fatal_cpu_limit(seconds: float) -> Iterator[None]:
    """Kill the process by SIGPROF if the block takes ``seconds`` of CPU time, even within C code. For the
    main thread of a child process that can be restarted."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
