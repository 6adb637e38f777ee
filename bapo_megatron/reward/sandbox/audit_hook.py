"""Python audit hook of a tested program, the sandbox's last layer: PermissionError for what it may not do.

It refuses changes of files outside the sandbox's directory, new processes, signals to others, and sockets but
socket pairs. Functions of os and signal that raise no audit event are removed. Where the kernel grants no
other layer it is the only one. C code other than Python's own bypasses it, so ctypes is refused, too, where
no kernel layer protects files. Used by ``isolation.py``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_PATHS_AND_FOLDERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "os.chmod": ((0,), (2,)),
    "os.chown": ((0,), (3,)),
    "os.mkdir": ((0,), (2,)),
    "os.remove": ((0,), (1,)),
    "os.rename": ((0, 1), (2, 3)),
    "os.rmdir": ((0,), (1,)),
    "os.utime": ((0,), (3,)),
    "os.truncate": ((0,), ()),
    "os.setxattr": ((0,), ()),
    "os.removexattr": ((0,), ()),
}
"""Audit events of changes to files: argument indices of paths, and of their folders' descriptors."""

_REFUSED = frozenset(
    (
        *("os.fork", "os.forkpty", "os.kill", "os.killpg", "os.system", "os.exec", "os.posix_spawn"),
        *("os.symlink", "os.link", "resource.prlimit", "signal.pthread_kill", "sqlite3.load_extension"),
    )
)
_WITHOUT_EVENT = (
    *("mkfifo", "mknod", "setsid", "setpgid", "setpriority", "chroot", "memfd_create", "pidfd_open"),
    *("pidfd_send_signal", "sched_setaffinity", "sched_setscheduler", "sched_setparam"),
)
"""Functions of os and signal without an audit event; they are removed."""

_AF_UNIX = 1
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SIGNALS_OF_FILES = (8, 10, 15, 1024, 1026)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY


def watch(box: str, alone: bool) -> None:
    """Install the hook in this process, for good.

    ``box``: the sandbox's directory, where files may be changed. ``alone``: no layer of the kernel holds
    files, so C code is refused too.
    """
    sys.modules["_posixshmem"] = None  # type: ignore[assignment]  # shared memory has no event either
    for module in filter(None, map(sys.modules.get, ("os", "posix", "signal", "_signal"))):
        for name in _WITHOUT_EVENT:
            if hasattr(module, name):
                delattr(module, name)
    sys.addaudithook(_hook(box, alone))


def _hook(box: str, alone: bool) -> Any:
    # What it uses is bound here: tested code may replace what modules and builtins hold.
    real, decoded, is_directory, null = os.path.realpath, os.fsdecode, os.path.isdir, os.devnull
    separator, inside, denied, unix = os.sep, os.path.realpath(box) + os.sep, PermissionError, _AF_UNIX
    changes, refused_events, flags, signals = _PATHS_AND_FOLDERS, _REFUSED, _WRITE_FLAGS, _SIGNALS_OF_FILES
    is_a, string, binary, integer, exactly = isinstance, str, bytes, int, str.__str__

    def text_of(path: Any) -> str | None:
        """A path as text, not of a class of the program's; None for a descriptor."""
        path = decoded(path) if is_a(path, binary) else path
        return exactly(path) if is_a(path, string) else None

    def outside(path: Any) -> bool:
        text = text_of(path)
        return text is not None and not (real(text) + separator).startswith(inside)

    def climbs(path: Any) -> bool:
        text = text_of(path)
        return text is not None and not text.startswith(separator) and ".." in text.split(separator)

    def changes_outside(event: str, arguments: tuple[Any, ...]) -> bool:
        places, folders = changes[event]
        for place in places:
            path = arguments[place]
            if is_a(path, integer) and event != "os.truncate":  # a file that was opened for reading
                return True
            if outside(path):
                return True
        relative = [place for place in folders if arguments[place] is not None and arguments[place] >= 0]
        return bool(relative) and [1 for place in places if climbs(arguments[place])] != []

    def opens(path: Any, mode: Any, how: Any) -> bool:
        if how & flags and text_of(path) != null and outside(path):
            return True
        # os.open has no mode. It tells no dir_fd, and may open a directory to be a later dir_fd.
        return mode is None and (climbs(path) or (outside(path) and is_directory(path)))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            refused = opens(arguments[0], arguments[1], arguments[2])
        elif event in changes:
            refused = changes_outside(event, arguments)
        elif event == "socket.__new__":
            refused = arguments[1] != unix
        elif event == "sqlite3.connect":
            database = arguments[0]
            refused = alone or (database not in (":memory:", "") and outside(database))
        elif event == "fcntl.fcntl":
            refused = arguments[1] in signals
        else:
            refused = event in refused_events or event.startswith(("socket.", "subprocess."))
            refused = refused or (alone and event.startswith("ctypes."))
        if refused:
            raise denied(f"not in the sandbox: {event}")

    return hook
