"""State of the engine pool: timeouts and their clock, each engine's slot, the current weights.

An engine that misses a timeout is put in quarantine, or reported as hanging; ``open_pool`` sets them. All is
synchronous but the clock, and local to the event loop of ``EnginePool``, which changes the slots. An engine
is chosen by prefix affinity and load.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bapo_megatron.hf.weight_files import weight_bytes
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.sent_weights import DigestQuorum
from bapo_megatron.types import Generation

LEAST_BYTES_PER_S = 100e6
"""The slowest disk that a load's deadline allows: bytes a second for one engine while all others read, too.
The 65.5 GB of a 32B model in bfloat16 may then take 11 minutes."""

_TICK_S = 0.5

AFFINITY_SURPLUS = 0.25
"""Prefix affinity: the extra load that the engine with a sequence's cached prefix may have over the least
loaded engine, as a share of an engine's capacity (most requests in flight).

The prefix cache of that engine saves the prefill of all tokens so far, up to 57k of 65k with segments of 8k:
seconds in which all requests of another engine would wait. A request more makes a decoding step longer by its
share of attention alone, since the weights are read once for all: a quarter more requests cost each less than
a quarter of its speed. Beyond that the engines' loads would drift apart, and an engine that has come back
would stay empty.
"""


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
    return base_s + read_seconds(weight_bytes(folder))


def read_seconds(weight_bytes: float) -> float:
    """Time to read the bytes of weights from the slowest disk, in seconds."""
    return weight_bytes / LEAST_BYTES_PER_S


class LoopLagClock:
    """A monotonic clock of one event loop, without its lag, in seconds.

    It stands still while the event loop lags: an answer that lies unread for half a minute, because ten
    thousand others came with it or the process was stopped, must not count as an engine's silence. Make it
    within the loop, where its ticks run until ``close``.
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
        self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._due - time.monotonic())
            woken = time.monotonic()
            self._late_s += max(0.0, woken - self._due)
            self._due = woken + _TICK_S


@dataclass(eq=False)
class EngineSlot:
    """The state of one engine in the pool: its requests in flight, health and quarantine."""

    engine: Engine
    is_up: bool = False
    load: int = 0
    """Requests in flight."""
    inflight: set[asyncio.Task[Generation]] = field(default_factory=set)
    last_answer_at: float = -math.inf
    """Time of its last answer; all times here are those of the pool's clock."""
    hang_report_backoff_s: float = 0.0
    """Seconds after ``hang_reported_at`` before a hang is reported again."""
    hang_reported_at: float = -math.inf
    ready_since: float = 0.0
    """Time since which it takes requests: its last return from quarantine."""
    is_busy: bool = False
    """Whether it is loading weights."""
    is_held: bool = False
    """Whether it gets no requests and no weights, because the policy has its GPU (colocated)."""
    backoff_s: float = 0.0
    """Extra wait before its next health check in quarantine: it is in a crash loop."""
    loads: int = 0
    """Number of weight loads; each empties the prefix cache."""
    version: int = 0
    """The weight version of its last load. Later requests have tokens of this version or newer ones."""
    reason: str = "it has no weights yet"
    """Why it is in quarantine."""


@dataclass(frozen=True, eq=False)
class CurrentWeights:
    """The current weight version: its HF folder, its digest quorum, and the deadline of a load.

    The pool keeps one; None while the newest weights are in no folder (broadcast, IPC).
    """

    folder: Path
    version: int
    quorum: DigestQuorum
    load_s: float
    """Deadline of an engine's load."""

    async def load(self, slot: EngineSlot) -> None:
        """Load the weights into an engine, and verify version and digest; raises if they are wrong."""
        engine = slot.engine
        if not slot.is_up:
            # Orphaned requests of an engine in quarantine: they were sent again to other engines.
            await engine.abort()
        await engine.load(self.folder, self.version, partial(self.quorum.confirm, engine.name))
        if (actual := await engine.weight_version()) != self.version:
            raise RuntimeError(f"reports weight version {actual} after a load of {self.version}")


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The location of a sequence's prefix cache: an engine, and the weight load that the cache belongs to.

    ``EnginePool.cached_at`` makes it after a segment, ``reserve`` takes it for the next one.
    """

    slot: EngineSlot
    loads: int

    @property
    def is_warm(self) -> bool:
        """Whether the cache still exists: the engine has not loaded weights since."""
        return self.slot.loads == self.loads


def choose(free: Sequence[EngineSlot], capacity: int, cached: CachedPrefix | None) -> EngineSlot:
    """The engine of ``free`` for a request: that of its cached prefix, or the least loaded one if that has
    far more load (``AFFINITY_SURPLUS``). ``capacity``: most requests in flight at an engine."""
    least = min(free, key=lambda slot: slot.load)
    if cached is None or cached.slot not in free or not cached.is_warm:
        return least
    return cached.slot if cached.slot.load <= least.load + AFFINITY_SURPLUS * capacity else least
