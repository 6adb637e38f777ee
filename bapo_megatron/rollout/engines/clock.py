"""The lag-free clock of engine timeouts: it stands still while this process's event loop lags.

An answer that lies unread for half a minute, because ten thousand others came with it or the process was
stopped, must not count as an engine's silence. The engine pool measures its timeouts by it.
"""

from __future__ import annotations

import asyncio
import time

_TICK_S = 0.5


class LoopLagClock:
    """A monotonic clock of one event loop, without its lag, in seconds.

    Make it within the loop, where its ticks run until ``close``. Made by ``EnginePool``.
    """

    def __init__(self) -> None:
        self._late_s = 0.0
        self._due = time.monotonic() + _TICK_S
        self._ticking = asyncio.create_task(self._tick())

    def now(self) -> float:
        """Monotonic seconds, less the event loop's lag: two readings differ by at most the real time."""
        return min(time.monotonic(), self._due) - self._late_s

    @property
    def late_s(self) -> float:
        """Total time that the event loop lagged, in seconds."""
        return self._late_s + max(0.0, time.monotonic() - self._due)

    def close(self) -> None:
        """Stop the clock."""
        self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._due - time.monotonic())
            woken = time.monotonic()
            self._late_s += max(0.0, woken - self._due)
            self._due = woken + _TICK_S
