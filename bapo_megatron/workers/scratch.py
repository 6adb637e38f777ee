"""Temporary directories of worker processes, and deletion of those that killed pools have left.

``Scratch()`` creates one; the process with the ``WorkerPool`` locks it (flock) while it is in use. Each pool
first calls ``remove_abandoned``. A flock is valid on one machine only: if machines share the location of
temporary files, each removes only its own directories, whose names contain the kernel's boot id.
"""

from __future__ import annotations

import fcntl
import os
import stat
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
    """Delete this user's directories whose owner was killed, unless fresh, within SWEEP_S. Never raises."""
    deadline = time.monotonic() + SWEEP_S
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):  # another user's, in use or already gone
                lock = os.open(path, _FOLDER)
                try:
                    found = os.fstat(lock)
                    if found.st_uid == os.geteuid() and found.st_mtime < time.time() - FRESH_S:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_tree(str(path), deadline - time.monotonic())
                finally:
                    os.close(lock)


def remove_tree(path: str, limit_s: float = SWEEP_S) -> None:
    """Delete a directory with its content. Never raises, and follows no links.
    Untrusted programs wrote the content, and its depth may exceed path, recursion and open-file limits: inner
    directories are moved to the top and deleted there. After ``limit_s`` seconds the rest stays."""
    deadline = time.monotonic() + limit_s
    with suppress(OSError):
        top = os.open(path, _FOLDER)
        try:
            _empty(top, deadline)
        finally:
            os.close(top)
        os.rmdir(path)


def _empty(top: int, deadline: float) -> None:
    """Delete the content of directory descriptor ``top``; the folders in a folder are moved up first."""
    names = _unlink_files(top, deadline)
    while names and time.monotonic() < deadline:
        name = names.pop()
        with suppress(OSError):
            folder = os.open(name, _FOLDER, dir_fd=top)
            try:
                for inner in _unlink_files(folder, deadline):
                    names.append(os.urandom(8).hex())
                    os.rename(inner, names[-1], src_dir_fd=folder, dst_dir_fd=top)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _unlink_files(folder: int, deadline: float) -> list[str]:
    """Delete everything except directories; make these accessible to their owner and return their names."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if time.monotonic() > deadline:
                break
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    _make_accessible(entry.name, folder)
                    folders.append(entry.name)
                else:
                    os.unlink(entry.name, dir_fd=folder)
    return folders


def _make_accessible(name: str, folder: int) -> None:
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        with suppress(OSError):
            os.chmod(f"/proc/self/fd/{place}", stat.S_IRWXU)
    finally:
        os.close(place)
