"""Progress line of a copy on stderr: share done, rate, ETA.

Rewritten at most five times a second in a terminal, and each ten seconds a new line in a log. Used by
``checkpoints_tools/conversion.py``, ``checkpoints_tools/inspection.py`` and
``checkpoints_tools/verification.py``.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

_TERMINAL_S = 0.2
_LOG_S = 10.0
"""Seconds between two lines: rewritten in a terminal, one after the other in a log file."""


class ByteProgress:
    """A counter of copied bytes that prints progress; ``add`` from any thread, ``end`` once.

    Made by ``convert`` and ``verify``.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = max(1, total)
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._shown = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` as done."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._shown >= (_TERMINAL_S if self._terminal else _LOG_S):
                self._shown = now
                self._show(now)

    def end(self) -> None:
        """Print the last line."""
        with self._lock:
            self._show(time.monotonic())
            if self._terminal:
                self._stream.write("\n")
                self._stream.flush()

    def _show(self, now: float) -> None:
        took = max(now - self._began, 1e-9)
        speed = self._done / took
        left = (self._total - self._done) / speed if speed else 0.0
        end = f"ETA {format_time(left)}" if left else f"took {format_time(took)}"
        share = f"{100 * self._done / self._total:3.0f} %"
        count = f"{format_bytes(self._done)} of {format_bytes(self._total)}"
        text = f"{share}  {count}  {format_bytes(speed)}/s  {end}"
        self._stream.write(f"\r\033[K{text}" if self._terminal else f"{text}\n")
        self._stream.flush()


def format_bytes(count: float) -> str:
    """A size in decimal units, as disks are sold: ``3.55 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:.3g} TB"


def format_time(seconds: float) -> str:
    """A duration: ``4 s``, ``3:05``, ``1:02:03``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
