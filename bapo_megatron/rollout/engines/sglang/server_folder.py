"""The private temporary folder (TMPDIR) of one SGLang server, for its ZMQ sockets, and its cleanup.

The sockets unpickle what they receive. In /tmp every user could list them, and a killed server leaves them.
Used by ``server_process.py``.
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
    """The identity of this machine since its boot, 6 characters: several machines may share a folder."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).hexdigest()[:6]


_PREFIX = f"bapo-{_host()}-"
"""Prefix of this machine's folders. Only they are swept: on some network file systems the locks of other
machines cannot be seen."""
_UNLOCKED = "bapo-nolock-"
"""Prefix of folders on a file system without locks. They are never swept: stale ones cannot be told."""
_LONGEST_BASE = 40
"""Longest path of the folder's parent. A socket's path has at most 107 bytes: SGLang and Python need 45
(``sgl_ar_fd_.../rank_...``, ``pymp-.../listener-...``), the folder 21."""
_YOUNG_S = 60.0
"""Age under which a folder is not swept: its owner may not have locked it yet."""
_SHARED = "/dev/shm/sglang_loads_"
"""Prefix of the shared-memory files with the loads of a server's processes; the rest of a name is random."""


class ServerFolder:
    """A temporary folder with mode 0700, locked by its owner until ``remove``.

    Making one sweeps the unlocked folders that killed servers have left on this machine. Made by
    ``ServerProcess`` and by ``serve``.
    """

    def __init__(self, parent: str | None = None) -> None:
        """``parent``: None for TMPDIR. /tmp replaces a parent whose path is too long for sockets, that does
        not exist (TMPDIR of a Slurm job's node, inside a container), or that is not writable."""
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
        except OSError:  # ENOLCK, ENOSYS: under its name the next sweep would remove it
            os.close(self._lock)
            os.rmdir(self.path)
            self.path = tempfile.mkdtemp(prefix=_UNLOCKED, dir=base)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        else:
            _sweep(base)

    def hand_on(self) -> None:
        """Keep the lock across ``exec``: this process becomes the server."""
        os.set_inheritable(self._lock, True)

    def remove(self) -> None:
        """Remove the folder and its content, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def shared_files(pid: int) -> set[Path]:
    """The shared-memory files of a server: those that the descendants of process ``pid`` have mapped."""
    return {Path(path) for one in descendants(pid) for path in _mapped(one) if path.startswith(_SHARED)}


def remove_files(paths: Collection[Path]) -> None:
    """Remove the shared-memory files of a server that has ended."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _mapped(pid: int) -> Iterator[str]:
    with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        for line in file:
            yield "/" + line.rstrip("\n").partition("/")[2]


def _sweep(base: str) -> None:
    """Remove this user's stale folders: those that this machine made and no process has locked."""
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
