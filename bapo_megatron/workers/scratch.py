"""Temporary directories of worker processes, and deletion of those that killed pools have left.

``Scratch()`` creates one; the process with the ``WorkerPool`` locks it (flock) while it is in use. Each pool
first calls ``remove_abandoned``. A flock is valid on one machine only: if machines share the location of
temporary files, each removes only its own directories, whose names contain the kernel's boot id.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = f"bapo_worker_{Path('/proc/sys/kernel/random/boot_id').read_text()[:13]}_"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

SWEEP_S = 20.0
"""Seconds that a pool's start may spend on abandoned directories; the next pool removes the rest."""


FRESH_S = 60.0
"""Age in seconds below which a directory's owner may not have locked it yet."""


class Scratch:
    """Temporary directory of one worker process, with a lock (flock) of the pool's process, the owner.
    ``remove`` deletes it; if the owner is killed, ``remove_abandoned`` of the next pool does."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if os.geteuid() == 0:  # tested programs run as another user and traverse it
            os.chmod(self.path, 0o711)

    def remove(self) -> None:
        """Delete the directory with its content and release the lock."""
        remove_tree(self.path)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Delete this user's directories whose owner was killed, unless fresh. Never raises. Begins with no other
    one after SWEEP_S."""
    deadline = time.monotonic() + SWEEP_S
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            if time.monotonic() > deadline:
                return
            with suppress(OSError):  # another user's, in use or already gone
                lock = os.open(path, _FOLDER)
                try:
                    found = os.fstat(lock)
                    if found.st_uid == os.geteuid() and found.st_mtime < time.time() - FRESH_S:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_tree(str(path))
                finally:
                    os.close(lock)


def remove_tree(path: str) -> None:
    """Delete a directory with its content. Never raises, and follows no links.
    Untrusted programs wrote the content: what is too deep for Python, or has no permissions, is left to
    ``find`` and ``rm``, each for SWEEP_S at most; then the rest stays."""
    with suppress(OSError, RecursionError):
        shutil.rmtree(path)
        return
    opened = ["find", path, "-type", "d", "!", "-perm", "-700", "-exec", "chmod", "700", "{}", ";"]
    for command in (opened, ["rm", "-rf", path]):
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SWEEP_S)
