"""Engine slots: one engine's state in the pool, its weights, and the choice by prefix affinity and load.

Synchronous and local to the event loop of ``EnginePool``, which changes the slots. Used in ``evaluation/``,
this folder and ``rollout/sampler/``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.sent_weights import DigestQuorum
from bapo_megatron.types import Generation

AFFINITY_SURPLUS = 0.25
"""Prefix affinity: the extra load that the engine with a sequence's cached prefix may have over the least
loaded engine, as a share of an engine's capacity (most requests in flight).

The prefix cache of that engine saves the prefill of all tokens so far, up to 57k of 65k with segments of 8k:
seconds in which all requests of another engine would wait. A request more makes a decoding step longer by its
share of attention alone, since the weights are read once for all: a quarter more requests cost each less than
a quarter of its speed. Beyond that the engines' loads would drift apart, and an engine that has come back
would stay empty.
"""


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
        if (found := await engine.weight_version()) != self.version:
            raise RuntimeError(f"reports weight version {found} after a load of {self.version}")


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
    least = min(free, key=lambda one: one.load)
    if cached is None or cached.slot not in free or not cached.is_warm:
        return least
    return cached.slot if cached.slot.load <= least.load + AFFINITY_SURPLUS * capacity else least
