"""The temporary folder of one server: where SGLang puts its sockets, which unpickle whatever arrives.

In the machine's /tmp everybody can list their names, and they stay behind when the server is killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from bapo_megatron.runtime.processes import descendants

_PREFIX = "bapo-sglang-"
_LONGEST_BASE = 40
"""Longest path of the folder's parent. A socket's path has at most 107 bytes: SGLang and Python need 45
(``sgl_ar_fd_.../rank_...``, ``pymp-.../listener-...``), the folder 21."""
_YOUNG_S = 60.0
"""Age under which a folder may not be locked yet."""
_SHARED = "/dev/shm/sglang_loads_"
"""Beginning of the files in which a server's processes tell each other their loads: the rest is random."""


class ServerFolder:
    """A folder with mode 0700, as TMPDIR. Who makes it, or becomes the server, holds a lock on it: folders
    that nobody holds are removed when the next one is made."""

    def __init__(self, parent: str | None = None) -> None:
        """``parent``: None for TMPDIR; one whose path is too long for sockets is not taken."""
        base = parent or tempfile.gettempdir()
        base = base if len(os.fsencode(base)) <= _LONGEST_BASE else "/tmp"
        _sweep(base)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def hand_on(self) -> None:
        """Let the program that this process becomes hold it."""
        os.set_inheritable(self._lock, True)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def shared_files(pid: int) -> set[Path]:
    """The files in shared memory, outside of its folder, that a server below process ``pid`` uses."""
    return {Path(path) for one in descendants(pid) for path in _mapped(one) if path.startswith(_SHARED)}


def remove_files(paths: Collection[Path]) -> None:
    """Remove what a server that is gone has left."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _mapped(pid: int) -> Iterator[str]:
    with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        for line in file:
            yield "/" + line.rstrip("\n").partition("/")[2]


def _sweep(base: str) -> None:
    """Remove the folders of this user that nobody holds."""
    for path in Path(base).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process was faster, or it is another user's
            about = path.lstat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < _YOUNG_S:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
