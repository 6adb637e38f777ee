"""A process that is of no use without the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """The kernel sends ``number`` to this process when the thread that started it ends, however it ends.

    ``parent``: its process, so that one that has ended before this call is not missed.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
