"""How long engines are waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTimeouts:
    """How long engines are waited for, in seconds."""

    heartbeat_s: float = 5.0
    """Between two looks at an engine."""
    silent_s: float = 20.0
    """An engine that has not answered for so long is lost."""
    abort_s: float = 60.0
    """For an abort of everything."""
    update_s: float = 600.0
    """For new weights, with all that belongs to it."""
    hang_s: float = 120.0
    """An engine that has not answered for so long, or not taken weights in time, hangs: it is to be ended."""
