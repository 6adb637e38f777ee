"""Temporary directories of workers; those of killed workers are removed at the next start.

A lock (flock) marks a directory as in use, and is valid on its own machine alone. If several machines share
the place for temporary files, each removes only its own directories, marked by the kernel's boot id.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = f"bapo_worker_{Path('/proc/sys/kernel/random/boot_id').read_text()[:13]}_"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_REMOVE, _OPEN_FOLDERS = ("rm", "-rf", "--"), ("chmod", "-R", "u+rwX", "--")
_NOTHING = subprocess.DEVNULL

SWEEP_S = 20.0
"""Time limit of a start for the directories of killed owners; the next start removes the rest."""


class Scratch:
    """Temporary directory of one worker, with a lock (flock) that its owner holds as long as it lives.

    ``remove`` deletes it; after a kill of the owner the next start does.
    """

    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            with suppress(FileNotFoundError):  # another process has taken it for an abandoned one just now
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.exists(self.path):
                    break
                os.close(self._lock)
        if os.geteuid() == 0:  # tested programs, then another user, go through it to their own directory
            os.chmod(self.path, 0o711)

    def remove(self) -> None:
        remove_tree(self.path)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Delete the directories of this user whose owner was killed. Never raises, and ends after SWEEP_S."""
    deadline = time.monotonic() + SWEEP_S
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):  # another's, in use, or gone by now
                lock = os.open(path, _FOLDER)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_tree(str(path), deadline - time.monotonic())
                finally:
                    os.close(lock)


def remove_tree(path: str, limit_s: float = SWEEP_S) -> bool:
    """Delete a directory with its content; whether it is gone. Never raises; of a link the link alone.

    Untrusted programs wrote it, so it may be deeper than the limits of paths, recursion and open files allow:
    ``rm`` copes with that. After ``limit_s`` seconds the rest stays.
    """
    deadline = time.monotonic() + limit_s
    for command in (_REMOVE, _OPEN_FOLDERS, _REMOVE):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not os.path.lexists(path):
            break
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([*command, path], stdin=_NOTHING, stdout=_NOTHING, stderr=_NOTHING, timeout=left_s)
    return not os.path.lexists(path)
