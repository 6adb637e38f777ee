"""Copy progress on stderr, drawn by rich: share done, bytes, recent rate, time left.

``byte_progress`` is a context manager around the copy, which yields the function to call with bytes done. In
a terminal a line changes five times a second, in a log a new line appears every ten seconds; a final line has
bytes, time and mean rate. A failing stderr costs the lines, not the work.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TextIO, cast

_TERMINAL_HZ = 5
_LOG_S = 10.0
"""Interval of log lines, seconds."""
_LOG_WIDTH = 120
"""Width of a log line in cells, ample: rich would otherwise use a narrow COLUMNS."""


@contextmanager
def byte_progress(
    total: int, is_shown: bool, stream: TextIO | None = None
) -> Iterator[Callable[[int], None]]:
    """Context manager of a copy of ``total`` bytes; yields a function that takes the bytes done, from any
    thread. The last line times the whole block, so callers publish the copy within it."""
    if not is_shown:
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import (
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    began = time.monotonic()
    stream = cast(TextIO, _Lossy(stream or sys.stderr))
    # Asked of the stream: rich takes FORCE_COLOR, which CI sets, for a terminal.
    terminal = stream.isatty()
    console = Console(file=stream, force_terminal=terminal, width=None if terminal else _LOG_WIDTH)
    progress = Progress(
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=_TERMINAL_HZ,
        get_time=time.monotonic,
        disable=not terminal,
        transient=True,
        redirect_stdout=False,  # otherwise the process's own prints go to stderr
        redirect_stderr=False,
    )
    task = progress.add_task("", total=max(1, total))
    lock, shown_s = threading.Lock(), time.monotonic()

    def add(nbytes: int) -> None:
        nonlocal shown_s
        progress.advance(task, nbytes)
        with lock:
            if not terminal and time.monotonic() - shown_s >= _LOG_S:
                shown_s = time.monotonic()
                console.print(progress.get_renderable())

    with progress:
        yield add
    taken_s = time.monotonic() - began
    rate = format_bytes(total / max(taken_s, 1e-3))
    print(f"{format_bytes(total)} in {timedelta(seconds=round(taken_s))}, {rate}/s", file=stream, flush=True)


class _Lossy:
    """Stream that drops unwritable text: rich would end the process, or the copy, at a closed pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` if possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if that is possible."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def format_bytes(count: float) -> str:
    """Return a size in decimal units, as disks are sold: ``3.55 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:.3g} TB"
