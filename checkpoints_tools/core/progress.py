"""Progress of a copy or comparison on stderr: share done, bytes, mean rate.

``byte_progress`` is a context manager around the work, which yields the function to call with bytes done. A
new line appears every ten seconds; a final line has bytes, time and mean rate. If stderr fails, lines are
lost and the work continues.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

_INTERVAL_S = 10.0
"""Interval of the lines, seconds."""


@contextmanager
def byte_progress(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Context manager of a copy of ``total`` bytes; yields a function that takes the bytes done, from any
    thread. The last line times the whole block, so callers publish the copy within it."""
    if not is_shown:
        yield lambda nbytes: None
        return
    began_s = shown_s = time.monotonic()
    lock, copied = threading.Lock(), 0

    def add(nbytes: int) -> None:
        nonlocal copied, shown_s
        with lock:
            copied += nbytes
            if time.monotonic() - shown_s >= _INTERVAL_S:
                shown_s = time.monotonic()
                _tell(f"{copied / max(1, total):.0%} of {format_bytes(total)}", copied, began_s)

    yield add
    _tell(format_bytes(total), total, began_s)


def _tell(what: str, nbytes: int, began_s: float) -> None:
    taken_s = time.monotonic() - began_s
    rate = format_bytes(nbytes / max(taken_s, 1e-3))
    with suppress(OSError):
        print(f"{what} in {timedelta(seconds=round(taken_s))}, {rate}/s", file=sys.stderr, flush=True)


def format_bytes(count: float) -> str:
    """Return a size in decimal units, as disks are sold: ``3.55 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:.3g} TB"
