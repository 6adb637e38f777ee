"""Temporary directories of worker processes; starting one also removes directories of killed workers.

``Scratch()`` creates one. A lock (flock), valid only on its own machine, marks a directory as in use. If
machines share the location of temporary files, each removes only its own directories, whose names contain the
kernel's boot id.
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
_DEPTH = 100  # maximum nested directories that are open together; deeper ones are moved up

SWEEP_S = 20.0
"""Seconds that a start may spend on abandoned directories; the next start removes the rest."""


class Scratch:
    """Temporary directory of one worker process, with a lock (flock) that its owner holds while it lives.
    ``remove`` deletes it; after a kill of the owner, the next start does."""

    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            with suppress(FileNotFoundError):  # another process just removed it as abandoned
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.exists(self.path):
                    break
                os.close(self._lock)
        if os.geteuid() == 0:  # tested programs run as another user and traverse it
            os.chmod(self.path, 0o711)

    def remove(self) -> None:
        """Delete the directory with its content and release the lock."""
        remove_tree(self.path)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Delete this user's directories whose owner was killed. Never raises; stops after SWEEP_S."""
    deadline = time.monotonic() + SWEEP_S
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):  # another user's, in use or already gone
                lock = os.open(path, _FOLDER)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_tree(str(path), deadline - time.monotonic())
                finally:
                    os.close(lock)


def remove_tree(path: str, limit_s: float = SWEEP_S) -> bool:
    """Delete a directory with its content; return whether it is gone. Never raises, follows no links.
    Untrusted programs wrote the content, so its depth may exceed path, recursion and open-file limits: deep
    directories are moved to the top and deleted there. After ``limit_s`` seconds the rest remains."""
    deadline = time.monotonic() + limit_s
    with suppress(OSError):
        top = os.open(path, _FOLDER)
        try:
            _empty(top, deadline)
        finally:
            os.close(top)
        os.rmdir(path)
    return not os.path.lexists(path)


def _empty(top: int, deadline: float) -> None:
    """Delete the content of directory descriptor ``top`` until nothing more can be deleted."""
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for name in _unlink_files(top, deadline):
            progress |= _remove_folder(name, top, deadline)


def _remove_folder(name: str, top: int, deadline: float) -> bool:
    """Delete a directory in ``top``, moving content deeper than _DEPTH up; return whether it changed."""
    changed = False
    folders, names, left = [top], [""], [[name]]
    while left:
        if left[-1]:
            inner = left[-1].pop()
            with suppress(OSError):
                folder = _opened(inner, folders[-1])
                if len(folders) < _DEPTH:
                    left.append(_unlink_files(folder, deadline))
                    folders.append(folder)
                    names.append(inner)
                else:
                    os.close(folder)
                    os.rename(inner, os.urandom(8).hex(), src_dir_fd=folders[-1], dst_dir_fd=top)
                    changed = True
            continue
        left.pop()
        if left:
            os.close(folders.pop())
            with suppress(OSError):
                os.rmdir(names.pop(), dir_fd=folders[-1])
                changed = True
    return changed


def _unlink_files(folder: int, deadline: float) -> list[str]:
    """Delete everything except directories, whose names it returns."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if time.monotonic() > deadline:
                break
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
                continue
            with suppress(OSError):
                os.unlink(entry.name, dir_fd=folder)
    return folders


def _opened(name: str, folder: int) -> int:
    """Make a directory in ``folder`` accessible to its owner and return its descriptor."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        with suppress(OSError):
            os.chmod(f"/proc/self/fd/{place}", stat.S_IRWXU)
    finally:
        os.close(place)
    return os.open(name, _FOLDER, dir_fd=folder)
