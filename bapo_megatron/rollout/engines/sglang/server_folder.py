"""The temporary folder of one server: where SGLang puts its sockets, which unpickle whatever arrives.

In the machine's /tmp everybody can list their names, and they stay behind when the server is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from bapo_megatron.runtime.processes import descendants


def _host() -> str:
    """What tells this machine, since its start, from others that may see the same folder: 6 characters."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).hexdigest()[:6]


_PREFIX = f"bapo-{_host()}-"
"""Locks of other machines are not seen on every network file system: only one's own folders are removed."""
_UNLOCKED = "bapo-nolock-"
"""Of folders where nothing can be locked: nobody knows when they are left, so they are never removed."""
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
        """``parent``: None for TMPDIR. /tmp is taken for one whose path is too long for sockets, that is not
        there (TMPDIR of a Slurm job's node, inside a container), or that cannot be written to."""
        base = parent or os.environ.get("TMPDIR") or "/tmp"
        if len(os.fsencode(base)) > _LONGEST_BASE or not os.path.isabs(base):
            base = "/tmp"
        try:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError:
            base = "/tmp"
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        except OSError:  # ENOLCK, ENOSYS: no next one may take it for left
            os.close(self._lock)
            os.rmdir(self.path)
            self.path = tempfile.mkdtemp(prefix=_UNLOCKED, dir=base)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        else:
            _sweep(base)

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
    """Remove the folders of this user, made on this machine, that nobody holds."""
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
