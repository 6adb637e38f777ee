"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import psutil


def until(is_true: Callable[[], object], told: Callable[[], object] = lambda: None) -> None:
    """Wait until it is true. AssertionError, with what is ``told``, after five minutes."""
    deadline = time.monotonic() + 300
    while not is_true():
        assert time.monotonic() < deadline, told()
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs and is not a zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
