"""State and rules of the engine pool: timeouts, clock, engine slots, current weights, choice of an engine.

``choose`` returns the engine for a request, and ``load_seconds`` the deadline of a weight load. The objects
belong to the event loop of an ``EnginePool``.
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
"""Read rate of the slowest disk, in bytes/s per engine: 65.5 GB (32B, bfloat16) may take 11 minutes."""

_TICK_S = 0.5

AFFINITY_SURPLUS = 0.25
"""Extra load that the engine with a sequence's cached prefix may have over the least loaded engine, as a
share of an engine's capacity (most requests in flight).

The prefix cache saves the prefill of all tokens so far, up to 57k of 65k with 8k segments: seconds for which
all requests on another engine would wait. An extra request lengthens a decode step only by its attention, as
weights are read once for all: a quarter more requests costs each less than a quarter of its speed. With a
higher value loads would drift apart, and a recovered engine would stay empty."""


@dataclass(frozen=True)
class EngineTimeouts:
    """Timeouts of the engine pool and of calls to a server, in seconds; a recipe sets ``request_s``, by
    ``request_minutes``, and ``update_s``, by ``update_minutes``."""

    request_s: float = 3600.0
    """Deadline of a request, which is then aborted and returns its tokens so far."""
    heartbeat_s: float = 5.0
    """Interval between an engine's health checks."""
    silent_s: float = 20.0
    """Longest time without an answer before quarantine."""
    abort_s: float = 60.0
    """Deadline for aborting one request or all, also for closing an engine."""
    update_s: float = 600.0
    """Deadline of a weight update, excluding the time to read the weights."""
    hang_s: float = 120.0
    """Longest time without an answer in quarantine before a hang is reported, to end the server."""


def load_seconds(folder: Path, base_s: float) -> float:
    """Return the load deadline of the weights in ``folder``: base_s + bytes / LEAST_BYTES_PER_S seconds."""
    return base_s + read_seconds(weight_bytes(folder))


def read_seconds(weight_bytes: float) -> float:
    """Return the seconds to read ``weight_bytes`` from the slowest disk."""
    return weight_bytes / LEAST_BYTES_PER_S


class LoopLagClock:
    """Clock of one event loop: ``now`` returns monotonic seconds, and stands still while the loop lags. An
    answer that stays unread for half a minute, because ten thousand others arrived with it or the process was
    stopped, must not count as an engine's silence. Construct it within the loop; it ticks until ``close``."""

    def __init__(self) -> None:
        self._late_s = 0.0
        self._due = time.monotonic() + _TICK_S
        self._ticking = asyncio.create_task(self._tick())

    def now(self) -> float:
        """Return monotonic seconds minus the loop's lag."""
        return min(time.monotonic(), self._due) - self._late_s

    @property
    def late_s(self) -> float:
        """Total lag of the event loop, in seconds."""
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
    """The pool's record of one engine: requests in flight, health, quarantine, and version of its weights."""

    engine: Engine
    is_up: bool = False
    load: int = 0
    """Requests in flight."""
    inflight: set[asyncio.Task[Generation]] = field(default_factory=set)
    last_answer_at: float = -math.inf
    """Time of the last answer, like all times here by the pool's clock."""
    hang_report_backoff_s: float = 0.0
    """Seconds after ``hang_reported_at`` before the next hang report."""
    hang_reported_at: float = -math.inf
    ready_since: float = 0.0
    """Time of its last return from quarantine."""
    is_busy: bool = False
    """Whether it is loading weights."""
    is_held: bool = False
    """Whether the policy has its GPU (colocated): no requests, health checks or recovery meanwhile."""
    backoff_s: float = 0.0
    """Extra seconds between health checks in quarantine, for a crash loop."""
    loads: int = 0
    """Number of weight loads; each empties the prefix cache."""
    version: int = 0
    """Weight version of its last load; later requests have tokens of this version or newer."""
    reason: str = "it has no weights yet"
    """Why it is in quarantine."""


@dataclass(frozen=True, eq=False)
class CurrentWeights:
    """Current weights in an HF folder, with version, load deadline, and the quorum that checks digests. The
    pool has one, or None while the newest weights are in no folder (broadcast, IPC)."""

    folder: Path
    version: int
    quorum: DigestQuorum
    load_s: float
    """Deadline of an engine's load, in seconds."""

    async def load(self, slot: EngineSlot) -> None:
        """Load the weights into an engine. Raises RuntimeError if its version or digest is then wrong."""
        engine = slot.engine
        if not slot.is_up:
            # Orphaned requests of a quarantined engine were resent to other engines.
            await engine.abort()
        await engine.load(self.folder, self.version, partial(self.quorum.confirm, engine.name))
        if (actual := await engine.weight_version()) != self.version:
            raise RuntimeError(f"reports weight version {actual} after a load of {self.version}")


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """Where a sequence's KV cache is: an engine, and its count of weight loads at that time (a load empties
    it). ``EnginePool.cached_at`` returns it after a segment; ``reserve`` takes it for the next segment."""

    slot: EngineSlot
    loads: int


def choose(free: Sequence[EngineSlot], capacity: int, cached: CachedPrefix | None) -> EngineSlot:
    """Return the engine of ``free`` for a request: the least loaded, or the one with the cached prefix unless
    its load is higher by over ``AFFINITY_SURPLUS`` of ``capacity`` (most requests in flight per engine)."""
    least = min(free, key=lambda slot: slot.load)
    if cached is None or cached.slot not in free or cached.slot.loads != cached.loads:
        return least
    return cached.slot if cached.slot.load <= least.load + AFFINITY_SURPLUS * capacity else least
