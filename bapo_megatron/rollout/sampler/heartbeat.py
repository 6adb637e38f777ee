"""Signs of life between two processes: one gives them while it works, the other ends it when they stop.

A process that is stopped, or hangs, does not close its pipe: whoever only reads waits for ever.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

ALIVE = ("alive",)
"""What is sent while an answer is in the making."""

BEAT_S = 5.0
"""Between two of them."""

_LOOKS = 20


async def answering(pipe: Connection, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, and say again and again that it goes on.

    From the event loop, because its hanging is what is to be noticed; whatever takes long must leave it free.
    """
    task = asyncio.create_task(work)
    while not (await asyncio.wait({task}, timeout=BEAT_S))[0]:
        await asyncio.to_thread(tell, pipe, ALIVE)
    return task.result()


def tell(pipe: Connection, message: Any) -> None:
    """Send it. If nobody is there any more, this process ends: nobody needs what it does."""
    try:
        pipe.send(message)
    except OSError:
        os._exit(0)


class Heartbeat:
    """Kills ``process`` if, in the block, ``heard`` is not called for ``limit_s`` seconds.

    Whoever waits for ``pipe``, to read or to write, finds it closed then, also if the process cannot be
    killed. The time is counted in many short waits: if both processes are stopped for hours (a suspended
    job), that is one of them, and no silence.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, limit_s: float) -> None:
        self._process, self._pipe, self._limit_s = process, pipe, limit_s
        self._waits = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler-watch", daemon=True)
        self.verdict: str | None = None
        """Why it was killed."""

    def heard(self) -> None:
        """It lives."""
        self._waits = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._limit_s / _LOOKS):
            self._waits += 1
            if self._waits >= _LOOKS:
                self.verdict = f"no sign of life for {self._limit_s:g} s"
                self._process.kill()
                with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:
                    ours.shutdown(socket.SHUT_RDWR)
                return
