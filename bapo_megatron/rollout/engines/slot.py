"""An engine slot: one engine of the pool, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bapo_megatron.interfaces import Engine
from bapo_megatron.types import Generation

AFFINITY_SURPLUS = 0.25
"""How many more requests than the least loaded engine the one that holds a sequence's prefix may have, as a
share of an engine's places.

The prefix cache of that engine saves the prefill of all tokens so far, up to 57k of 65k with segments of 8k:
seconds in which all requests of another engine would wait. A request more makes a decoding step longer by its
share of attention alone, since the weights are read once for all: a quarter more requests cost each less than
a quarter of its speed. Beyond that the engines' loads would drift apart, and an engine that has come back
would stay empty.
"""


@dataclass(eq=False)
class EngineSlot:
    """One engine of the pool, its requests and its health."""

    engine: Engine
    is_up: bool = False
    load: int = 0
    """Requests in flight."""
    inflight: set[asyncio.Task[Generation]] = field(default_factory=set)
    last_answer_at: float = -math.inf
    """When it last answered, by the pool's clock as all times here."""
    hang_report_backoff_s: float = 0.0
    """Seconds after ``hang_reported_at`` during which the engine's hanging is not reported again."""
    hang_reported_at: float = -math.inf
    ready_since: float = 0.0
    """When it came, or came back."""
    is_busy: bool = False
    """Weights are on their way to it."""
    is_held: bool = False
    """It takes no request and no weights: the GPU is the policy's (time-sharing)."""
    backoff_s: float = 0.0
    """Extra wait before the engine is tried again: it failed soon after it had come."""
    loads: int = 0
    """How often it has taken weights, which empties its prefix cache."""
    reason: str = "it has no weights yet"
    """Why it is in quarantine."""


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """Where the keys and values of a sequence are cached: an engine, since its latest weights."""

    slot: EngineSlot
    loads: int

    @property
    def is_warm(self) -> bool:
        """Whether the engine has had the same weights since, and so the same cache."""
        return self.slot.loads == self.loads


def choose(free: Sequence[EngineSlot], places: int, cached: CachedPrefix | None) -> EngineSlot:
    """The engine of ``free`` for a request: the least loaded, or that of its prefix if not far more loaded.

    ``places``: most requests at an engine. See ``AFFINITY_SURPLUS``.
    """
    least = min(free, key=lambda one: one.load)
    if cached is None or cached.slot not in free or not cached.is_warm:
        return least
    return cached.slot if cached.slot.load <= least.load + AFFINITY_SURPLUS * places else least
