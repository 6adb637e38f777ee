"""Isolation of tested code: namespaces, resource limits, a seccomp filter of system calls, an audit hook.

Runs in the sandbox's own processes (child.py) and imports nothing but the standard library. A wall that this
kernel does not permit is named in a note; the others stand without it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_THREAD = 0x20000000, 0x40000000, 0x00010000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 1 << 18
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522

BOX_MB = 64
"""Size of the sandbox's directory, a tmpfs."""

OUTPUT_BYTES = 8 << 20
"""Longest output, and largest file, of a case."""

# Numbers of denied system calls: new programs and processes, signals, sockets (a socketpair is fine), other
# namespaces and mounts, looking into processes, and io_uring, which can do some of these unseen.
_DENIED_EVERYWHERE = (424, 425, 428, 429, 430, 442)
_DENIED = {
    "x86_64": (
        *(41, 42, 57, 58, 59, 62, 101, 129, 155, 165, 166, 200, 234, 272, 297, 308, 310, 311, 321, 322),
        *_DENIED_EVERYWHERE,
    ),
    "aarch64": (
        *(39, 40, 41, 97, 117, 129, 130, 131, 138, 198, 203, 221, 240, 268, 270, 271, 280, 281),
        *_DENIED_EVERYWHERE,
    ),
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# --- before tested code exists -------------------------------------------------------------------


def separate(box: str) -> list[str]:
    """Give this process, from its next child on, namespaces of its own. Returns notes on what is missing.

    There: no network, no process outside can be seen or signalled, the file system is read-only but for
    ``box``, a directory in memory of BOX_MB.
    """
    inside = (os.getuid(), os.getgid())
    flags = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNS
    try:
        _check(LIBC.unshare(flags | (CLONE_NEWUSER if os.geteuid() else 0)), "unshare")
        if os.geteuid() != inside[0]:
            _map_user(*inside)
    except OSError as error:
        return [f"no namespaces ({error}): network, other processes and files are kept off less firmly"]
    try:
        _close_file_system(box)
    except OSError as error:
        return [f"no read-only file system ({error}): files elsewhere are kept off less firmly"]
    return []


def _map_user(user: int, group: int) -> None:
    """Map the user and group to themselves in the new user namespace; else no file could be made."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _close_file_system(box: str) -> None:
    _check(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(len(read_only))
    try:  # Linux 5.12
        result = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, size)
        _check(result, "mount_setattr")
    finally:
        options = f"size={BOX_MB}m,mode=0700".encode()
        flags = MS_NOSUID | MS_NODEV
        _check(LIBC.mount(b"tmpfs", os.fsencode(box), b"tmpfs", flags, options), "mount tmpfs")


def be_untraceable() -> None:
    """Keep the processes that run tested code from tracing this one (PR_SET_DUMPABLE)."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def filter_note() -> list[str]:
    """A note if system calls cannot be filtered here."""
    if os.uname().machine not in _DENIED:
        return [f"no filter of system calls for {os.uname().machine}: tested code may start processes"]
    LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0)  # EFAULT from a kernel that would take one
    if ctypes.get_errno() != errno.EFAULT:
        return ["the kernel filters no system calls: tested code may start processes"]
    return []


# --- around tested code --------------------------------------------------------------------------


def close_in(box: str, memory_mb: int, cpu_s: int, filters: bool) -> None:
    """Put this process under every limit, for good. Raises OSError where that fails."""
    _limit(memory_mb, cpu_s, filters)
    _check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _check(LIBC.capset(header, bytes(24)), "capset")
    if filters:
        _filter_calls(os.uname().machine)
    sys.addaudithook(_hook(box))


def _limit(memory_mb: int, cpu_s: int, filters: bool) -> None:
    memory = memory_mb << 20
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: OUTPUT_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if not filters:  # which deny all processes; this counts all of the user's, threads too
        limits[resource.RLIMIT_NPROC] = 64
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _filter_calls(machine: str) -> None:
    """A seccomp program: an error for the denied calls and for clones that are no threads."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, missing = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    program = [
        (load, 0, 0, 4),  # the architecture
        *((equal, 1, 0, _AUDIT_ARCH[machine]), (give, 0, 0, deny)),
        (load, 0, 0, 0),  # the number
        *((at_least, 0, 1, 0x40000000), (give, 0, 0, deny)),  # x32
    ]
    for number in _DENIED[machine]:
        program += [(equal, 0, 1, number), (give, 0, 0, deny)]
    program += [(equal, 0, 1, _CLONE3), (give, 0, 0, missing)]  # so that the C library takes clone
    program += [(equal, 0, 3, _CLONE[machine]), (load, 0, 0, 16), (any_bit, 1, 0, CLONE_THREAD)]
    program += [(give, 0, 0, deny), (give, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")


_WRITES = ("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink")
_STARTS = ("os.fork", "os.forkpty", "os.kill", "os.killpg", "os.system", "os.exec", "os.posix_spawn")
_AF_UNIX = 1
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _hook(box: str) -> Any:
    """An audit hook that refuses what Python code does in plain sight, for kernels without other walls."""
    real, unix, denied = os.path.realpath, _AF_UNIX, PermissionError
    inside = real(box) + os.sep

    def outside(path: object) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        return isinstance(path, str) and path != os.devnull and not real(path).startswith(inside)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            refused = bool(arguments[2] & _WRITE_FLAGS) and outside(arguments[0])
        elif event == "socket.__new__":
            refused = arguments[1] != unix
        else:
            refused = (
                event.startswith(("socket.", "subprocess."))
                or event in _STARTS
                or (event in _WRITES and any(outside(argument) for argument in arguments))
            )
        if refused:
            raise denied(f"not in the sandbox: {event}")

    return hook
