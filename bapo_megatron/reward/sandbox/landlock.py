"""Landlock layer: the kernel restricts a process and its children to files beneath some paths (Linux 5.13).

``isolation.py`` applies it; any user may use it, also in containers without namespaces. An older version of
Landlock leaves some actions open (truncation before 6.2, signals and abstract sockets before 6.12); changes
of the mode, owner and times of a file always are. Structures are those of linux/landlock.h. Used by
``isolation.py``.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM, _REFER = (
    1 << bit for bit in (4, 5, 7, 8, 12, 13)
)
_READ = _READ_FILE | _READ_DIR
_OWN = (
    _READ | _WRITE_FILE | _TRUNCATE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER
)
_ANY_FILE = _READ_FILE | _WRITE_FILE | _TRUNCATE

_LIBC = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The kernel's version of Landlock; 0 or less if it has none, or if it is off."""
    found: int = _LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)
    return found


def confine(own: str, readable: Iterable[str], devices: Iterable[str]) -> bool:
    """Let this process write in the folder ``own`` and to ``devices`` alone, and read ``readable`` besides.

    For good. It also connects no TCP, signals no process outside and traces none, by the kernel's version.
    Needs no_new_privs. False if the kernel has no Landlock.
    """
    known = version()
    if known < 1:
        return False
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(known, 16)) - 1
    asked = struct.pack("QQQ", handled, 3 if known >= 4 else 0, 3 if known >= 6 else 0)
    size = ctypes.c_size_t(8 if known < 4 else 16 if known < 6 else 24)
    rules: int = _LIBC.syscall(_CREATE, asked, size, 0)
    if rules < 0:
        return False
    try:
        _permit(rules, own, _OWN & handled)
        for path in readable:
            _permit(rules, path, _READ)
        for path in devices:
            _permit(rules, path, _ANY_FILE & handled)
        return bool(_LIBC.syscall(_RESTRICT, rules, 0) == 0)
    finally:
        os.close(rules)


def _permit(rules: int, path: str, rights: int) -> None:
    """Permit ``rights`` at a file, or beneath a folder; nothing if it is not there."""
    with suppress(OSError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights = rights if os.path.isdir(path) else rights & _ANY_FILE
            _LIBC.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
        finally:
            os.close(place)
