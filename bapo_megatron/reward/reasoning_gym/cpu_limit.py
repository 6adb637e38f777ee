"""A limit of processor time for one call in the main thread: a slow verifier is given up, its worker is not.

Processor time, since on a busy machine an honest answer may take long by the clock.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(BaseException):
    """The call took too long. No Exception, so that a verifier's ``except Exception`` lets it through."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime within the block after so much processor time, again and again until it has ended: a
    bare ``except`` may swallow one. Outside of the main thread there is no limit."""
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
