"""How a child process ends with the process that started it, even by ``kill -9``."""

from __future__ import annotations

import fcntl
import os
import select
import signal


def end_with(descriptor: int) -> None:
    """End this process and its group when the other end of the pipe closes.

    The kernel does it by a signal: a thread that waits could not, while C code of another holds the
    interpreter. PR_SET_PDEATHSIG would end it with the *thread* that started it.
    """
    os.set_inheritable(descriptor, False)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(descriptor, select.POLLIN)
    if closed.poll(0):  # before the signal was ordered
        os.killpg(0, signal.SIGKILL)
