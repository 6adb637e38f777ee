"""The timeouts of the engine pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LEAST_BYTES_PER_S = 100e6
"""The slowest disk that engines are not declared hung for: bytes a second with which one engine reads a
version of the weights while all the others read it, too. For 65.5 GB (32B in bfloat16) that is 11 minutes."""


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
    """Longest weight update, with all that belongs to it, beside the reading of the weights' bytes."""
    hang_s: float = 120.0
    """An engine that has not answered for so long, or not taken weights in time, hangs: it is to be ended."""


def load_seconds(folder: Path, base_s: float) -> float:
    """Deadline of a load of the weights in ``folder``: ``base_s``, and the time for their bytes.

    deadline = base_s + bytes / LEAST_BYTES_PER_S
    """
    return base_s + read_seconds(sum(path.stat().st_size for path in folder.glob("*.safetensors")))


def read_seconds(weight_bytes: float) -> float:
    """Time to read so many bytes of weights from the slowest disk."""
    return weight_bytes / LEAST_BYTES_PER_S
