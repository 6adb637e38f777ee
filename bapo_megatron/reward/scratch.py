"""Temporary directories of reward workers, removed also after their owner was killed: at the next start.

A directory's lock holds on the machine that took it, also where the place for temporary files is shared by
several. So each looks after its own, told apart by the kernel's id of its present start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = f"bapo_reward_{Path('/proc/sys/kernel/random/boot_id').read_text()[:13]}_"


class Scratch:
    """A temporary directory with a lock (flock) that its owner holds for as long as it lives."""

    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            with suppress(FileNotFoundError):  # another process has taken it for an abandoned one just now
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.exists(self.path):
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Delete the directories whose owner was killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another's, in use, or gone by now
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
