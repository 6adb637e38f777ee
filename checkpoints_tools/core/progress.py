"""Progress of a copy on stderr, drawn by rich: share done, bytes, rate, time left, at the end time taken.

A line that changes five times a second in a terminal, and each ten seconds a new line in a log. Used by
``checkpoints_tools/conversion.py``, ``checkpoints_tools/inspection.py`` and
``checkpoints_tools/verification.py``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_TERMINAL_HZ = 5
_LOG_S = 10.0
"""Seconds between two lines of a log."""
_LOG_WIDTH = 120
"""Cells of a log's line, wider than any: rich would take a narrow COLUMNS for the log's."""


@contextmanager
def byte_progress(
    total: int, is_shown: bool, stream: TextIO | None = None
) -> Iterator[Callable[[int], None]]:
    """The context of a copy of ``total`` bytes. Call its value, from any thread, with bytes that are done."""
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

    stream = stream or sys.stderr
    # Asked of the stream, not of rich: rich takes FORCE_COLOR, which CI sets, for a terminal.
    terminal = stream.isatty()
    console = Console(file=stream, force_terminal=terminal, width=None if terminal else _LOG_WIDTH)
    progress = Progress(
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        refresh_per_second=_TERMINAL_HZ,
        get_time=time.monotonic,
        disable=not terminal,
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
    if not terminal:
        console.print(progress.get_renderable())


def format_bytes(count: float) -> str:
    """A size in decimal units, as disks are sold: ``3.55 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:.3g} TB"
