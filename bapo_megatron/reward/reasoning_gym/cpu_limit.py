"""CPU time limit of one call in the main thread: ends a slow verifier without ending its worker process.

CPU time and not wall time: on a busy machine an honest answer may take long. ``reward.py`` encloses each
verifier in it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(BaseException):
    """CPU time limit exceeded; a BaseException, so that a verifier's ``except Exception`` lets it through.

    Raised within ``cpu_limit``, caught in ``reward.py``.
    """


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime within the block after ``seconds`` of CPU time, repeatedly until the block has ended.

    Repeatedly: a bare ``except`` may swallow one. Outside of the main thread there is no limit.
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
