"""CPU time limits of a block of code, for scores that a busy machine must not change.

On a clock an honest answer may take seconds, where the machine is busy or the job is paused: its response
would be called wrong, without a failure.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(BaseException):
    """CPU time limit exceeded; a BaseException, so that a library's ``except Exception`` lets it through.

    Raised within ``cpu_limit``, caught around it.
    """


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime within the block after ``seconds`` of CPU time, repeatedly until the block has ended.

    Repeatedly: a bare ``except`` may swallow one. Outside of the main thread there is no limit. Blocks do not
    nest: an inner one would end the outer limit.
    """
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
    """End the process, by SIGPROF, if the block takes ``seconds`` of CPU time, also within a call of C code.

    For the main thread of a child that can be started again.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
