"""Heartbeats and watchdog of the sampler process: it sends beats while it works, and is killed without them.

The process uses ``with_heartbeats``, the trainer ``HeartbeatWatchdog``. A process that is stopped, or hangs,
does not close its pipe: a reader without a timeout would wait for ever. Used by ``client.py`` and
``process.py``.
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
"""The heartbeat message, sent while a reply is computed."""

BEAT_S = 5.0
"""Seconds between two heartbeats."""

_WAITS = 20
"""Number of waits that make up the timeout of a ``HeartbeatWatchdog``."""


async def with_heartbeats(pipe: Connection, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and send heartbeats until it is done; returns its result.

    The event loop sends them, so that they stop when it hangs: long work must not block it.
    """
    task = asyncio.create_task(work)
    while not (await asyncio.wait({task}, timeout=BEAT_S))[0]:
        await asyncio.to_thread(send, pipe, ALIVE)
    return task.result()


def send(pipe: Connection, message: Any) -> None:
    """Send a message to the trainer. If the trainer has ended, this process ends at once."""
    try:
        pipe.send(message)
    except OSError:
        os._exit(0)


class HeartbeatWatchdog:
    """A watchdog that kills ``process`` if ``beat`` is not called for ``limit_s`` seconds within the block.

    A context manager, with a thread. Reads and writes of ``pipe`` fail after the kill, also if the process
    cannot be killed. Time is counted in many short waits: if both processes are stopped for hours (a
    suspended job), that counts as one wait. Made by ``SamplerClient`` around each call.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, limit_s: float) -> None:
        self._process, self._pipe, self._limit_s = process, pipe, limit_s
        self._waits = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler-watch", daemon=True)
        self.kill_reason: str | None = None
        """Why the process was killed; None if it was not."""

    def beat(self) -> None:
        """Note a heartbeat of the process."""
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
        while not self._over.wait(self._limit_s / _WAITS):
            self._waits += 1
            if self._waits >= _WAITS:
                self.kill_reason = f"no heartbeat for {self._limit_s:g} s"
                self._process.kill()
                # The pipe, too: a process that is blocked in the kernel keeps its end open after the kill.
                with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:
                    ours.shutdown(socket.SHUT_RDWR)
                return
