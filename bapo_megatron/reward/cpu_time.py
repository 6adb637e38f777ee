"""Limit of the CPU time of a block of code, for the main thread of a reward worker.

Past the limit ``cpu_limit`` raises OutOfTime, a BaseException, in the block. Under a wall-clock limit a
correct answer could count as wrong on a busy or paused machine.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(BaseException):
    """Raised in a block whose ``cpu_limit`` is exceeded, for the caller to catch around the block. A
    BaseException, so that a library's ``except Exception`` does not catch it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after every ``seconds`` of the process's CPU time (user mode) until the
    block ends: a bare ``except`` may swallow the first. Has no effect outside the main thread. Blocks must
    not nest: an inner one cancels the outer limit."""
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
