"""Questions to a file system that may not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection


class NoAnswer(Exception):
    """Nothing has come within the time that was given."""


def within(limit_s: float, ask: Callable[[], str]) -> str:
    """What ``ask`` returns, or raises; NoAnswer after ``limit_s`` seconds.

    It is asked in a process of its own: one that waits for a file system that hangs cannot be ended, and
    neither could a process with such a thread.
    """
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        _answer(theirs, ask)
    theirs.close()
    with ours:
        if not ours.poll(limit_s):
            os.kill(pid, signal.SIGKILL)  # it ends when the file system lets it
            raise NoAnswer
        try:
            answer: str | BaseException = ours.recv()
        finally:
            os.waitpid(pid, 0)
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _answer(pipe: Connection, ask: Callable[[], str]) -> None:
    code = 1
    try:
        try:
            pipe.send(ask())
        except Exception as error:
            pipe.send(error)
        code = 0
    finally:
        os._exit(code)
