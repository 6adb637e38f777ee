"""The timeouts of the engine pool (health checks, aborts, weight loads, hangs), and the clock they run on.

An engine that misses one is put in quarantine, or reported as hanging. ``open_pool`` sets them.
The clock stands still while this process's event loop lags: an answer that lies unread for half a minute,
because ten thousand others came with it or the process was stopped, must not count as an engine's silence.
Used in ``commands/``, ``planning/``, ``rollout/engines/sglang/`` and this folder.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

LEAST_BYTES_PER_S = 100e6
"""The slowest disk that a load's deadline allows: bytes a second for one engine while all others read, too.
The 65.5 GB of a 32B model in bfloat16 may then take 11 minutes."""

_TICK_S = 0.5


@dataclass(frozen=True)
class EngineTimeouts:
    """Timeouts of the engine pool, in seconds. A run sets ``update_s`` (its ``update_minutes``) only."""

    heartbeat_s: float = 5.0
    """Interval of an engine's health checks."""
    silent_s: float = 20.0
    """Longest time without an answer; then the engine is put in quarantine."""
    abort_s: float = 60.0
    """Longest abort of all requests."""
    update_s: float = 600.0
    """Longest weight update, without the time to read the weights' bytes."""
    hang_s: float = 120.0
    """Longest time without an answer in quarantine; then the engine hangs, and its server must be ended."""


def load_seconds(folder: Path, base_s: float) -> float:
    """deadline = base_s + bytes / LEAST_BYTES_PER_S: of a load of the weights in ``folder``, in seconds."""
    return base_s + read_seconds(sum(path.stat().st_size for path in folder.glob("*.safetensors")))


def read_seconds(weight_bytes: float) -> float:
    """Time to read the bytes of weights from the slowest disk, in seconds."""
    return weight_bytes / LEAST_BYTES_PER_S


class LoopLagClock:
    """A monotonic clock of one event loop, without its lag, in seconds.

    Make it within the loop, where its ticks run until ``close``.
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
