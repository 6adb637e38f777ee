"""The timeouts of the engine pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTimeouts:
    """Timeouts of the engine pool, in seconds."""

    heartbeat_s: float = 5.0
    """Interval between two health checks of an engine."""
    silent_s: float = 20.0
    """An engine that has not answered for so long is lost."""
    abort_s: float = 60.0
    """Longest abort of all requests."""
    update_s: float = 600.0
    """Longest weight update, with all that belongs to it."""
    hang_s: float = 120.0
    """An engine that has not answered for so long, or not taken weights in time, hangs: it is to be ended."""
