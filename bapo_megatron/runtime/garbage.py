"""Garbage collection beside imports: torch and megatron-core make two million objects, which stay.

Python's collector looks through them again and again while they are imported, which took a third of a start,
and in each full collection afterwards: a quarter of a second, in each checkpoint that megatron-core saves.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """Make collections rare: in a command, which has a lot to import, until ``keep_imports``; in a process
    whose only cycles are errors with their tracebacks, for good."""
    gc.set_threshold(100_000, 20, 100)


def keep_imports() -> None:
    """Exempt all objects of this process from collections, which are as frequent as usual from now on."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
