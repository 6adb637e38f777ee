"""File system of a sandbox: a new root (pivot_root) with Python's libraries, one directory and three devices.

``pivot_to_own_root`` and ``confine`` (Landlock) permanently change the calling process, a sandbox's server.
``box`` is the one writable directory; libraries are read-only. The root has no home, run directory, dataset,
or sockets and FIFOs of others; /proc shows only the sandbox's processes (before Linux 5.8 also the machine's
settings, read-only).

Landlock (Linux 5.13, linux/landlock.h) restricts a process and its children to files beneath given paths. Any
user may use it, even in containers without namespaces. Older versions allow some actions (truncation before
6.2, signals and abstract sockets before 6.12); none restricts changes of file mode, owner and times.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import site
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20, 0x1000, 0x4000, 1 << 18, 2
_OPTIONS = {b"noexec": _MS_NOEXEC, b"noatime": 1 << 10, b"nodiratime": 1 << 11, b"relatime": 1 << 21}
"""Mount options that a remount must repeat to keep them."""
_AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = -100, 0x8000, 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

BOX_MB = 64
"""Size of the sandbox directory, a tmpfs, in MiB."""

BOX_FILES = 4096
"""Maximum number of files and directories in it."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

_SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime"),
)
_NEAR = {"stdin": "0", "stdout": "1", "stderr": "2", "fd": ""}

_LIBC = ctypes.CDLL(None, use_errno=True)


def readable() -> list[str]:
    """Return the files and folders that Python reads: its libraries and the system's, without nested folders.
    Of an environment (venv, conda) only ``lib``: folders next to it may hold data."""
    homes = dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))
    libraries = [os.path.join(home, lib) for home in homes for lib in ("lib", "lib64")]
    wanted = [*_SYSTEM, os.path.dirname(os.__file__), *libraries, *packages()]
    chosen: list[str] = []
    for path in sorted({os.path.abspath(path) for path in wanted if os.path.exists(path)}):
        if not _beneath(path, chosen):
            chosen.append(path)
    real = [*chosen, *map(os.path.realpath, chosen)]
    return [*chosen, *sorted(path for path in _mapped_libraries() if not _beneath(path, real))]


def packages() -> list[str]:
    """Return the folders of installed packages."""
    return [path for path in site.getsitepackages() if os.path.isdir(path)]


def _beneath(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _mapped_libraries() -> set[str]:
    with open("/proc/self/maps") as file:
        paths = {line.rstrip("\n").partition("/") for line in file if ".so" in line}
    return {"/" + path for _, slash, path in paths if slash and os.path.isfile("/" + path)}


def pivot_to_own_root(box: str, paths: list[str], user: int, group: int) -> None:
    """Create the new root and pivot to it; ``box`` becomes a tmpfs of ``user`` and ``group`` there. For the
    first process of a process namespace with its own mount namespace. Raises OSError if forbidden."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", box, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=2048,mode=0755")
    try:
        _furnish_and_enter(box, paths, f"uid={user},gid={group}")
    except BaseException:
        _LIBC.umount2(os.fsencode(box), _MNT_DETACH)
        raise


def _furnish_and_enter(box: str, paths: list[str], owner: str) -> None:
    for path in paths:
        _show(path, box + path)
    for folder in ("/dev", "/proc", box):
        os.makedirs(box + folder, exist_ok=True)
    for device in DEVICES:
        os.close(os.open(box + device, os.O_CREAT, 0o644))
    for name, number in _NEAR.items():
        os.symlink(f"/proc/self/fd/{number}", f"{box}/dev/{name}")
    _make_read_only(box)
    for device in DEVICES:  # last: nodev would disable them
        _mount(device, box + device, None, _MS_BIND)
        _make_read_only(box + device, 0)  # its mode and times; writes still work
    _mount_proc(box + "/proc")
    own = f"size={BOX_MB}m,nr_inodes={BOX_FILES},mode=0700,{owner}"
    _mount("tmpfs", box + box, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, own)
    os.chdir(box)
    pivot_root = _PIVOT_ROOT.get(os.uname().machine, -1)
    check(_LIBC.syscall(pivot_root, b".", b"."), "pivot_root")
    check(_LIBC.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir(box)


def _show(path: str, place: str) -> None:
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(place, os.O_CREAT | os.O_EXCL, 0o644))
    _mount(path, place, None, _MS_BIND | _MS_REC)


def _make_read_only(root: str, without: int = _MS_NODEV) -> None:
    """Make ``root`` and its mounts read-only, without set-user-id programs or (by ``without``) devices."""
    flags = _MS_RDONLY | _MS_NOSUID | without  # equal in mount(2) and mount_setattr(2)
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    result = _LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(root), _AT_RECURSIVE, attributes, size)
    if result < 0 and ctypes.get_errno() in (
        errno.ENOSYS,
        errno.EPERM,
    ):  # before Linux 5.12; older containers
        for place, kept in _mounts_beneath(root):
            _mount(None, place, None, flags | kept | _MS_REMOUNT | _MS_BIND)
    else:
        check(result, "mount_setattr")


def _mounts_beneath(root: str) -> list[tuple[str, int]]:
    with open("/proc/self/mountinfo", "rb") as file:
        lines = [line.split(b" ") for line in file.read().split(b"\n") if line]
    places = (re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line[4]) for line in lines)
    flags = (sum(_OPTIONS.get(option, 0) for option in line[5].split(b",")) for line in lines)
    mounts = zip(map(os.fsdecode, places), flags, strict=True)
    return [(place, kept) for place, kept in mounts if _beneath(place, [root])]


def _mount_proc(place: str) -> None:
    """Mount a /proc with only the namespace's processes. A container that hides parts of its own /proc may
    forbid this; then the sandbox has no /proc."""
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    for options in ("subset=pid", None):  # before Linux 5.8 all of /proc, read-only
        with suppress(OSError):
            _mount("proc", place, "proc", flags, options)
            return


def _mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, place, kind, options)]
    result = _LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    check(result, f"mount {kind or 'a view'} at {place}")


def check(result: int, what: str) -> None:
    """Raise OSError for a failed libc call ``what``."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# --- Landlock ------------------------------------------------------------------------------------

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


def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 or less if it is missing or off."""
    version: int = _LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)
    return version


def confine(own: str, readable: Iterable[str], devices: Iterable[str]) -> bool:
    """Permanently restrict this process: write only in the folder ``own`` and to ``devices``, read also
    ``readable``. Depending on the kernel version, also blocks TCP, and signals to and traces of outside
    processes. Needs no_new_privs. Returns False if the kernel has no Landlock."""
    known = landlock_version()
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
    """Permit ``rights`` at a file or beneath a folder; does nothing if it is missing."""
    with suppress(OSError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights = rights if os.path.isdir(path) else rights & _ANY_FILE
            _LIBC.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
        finally:
            os.close(place)
