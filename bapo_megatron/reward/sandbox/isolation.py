"""Isolation of tested code (the sandbox's walls): namespaces, files, user, Landlock, seccomp.

Runs in the sandbox's processes (child.py) and imports no third-party package. Once per sandbox:
``enter_namespaces``, which returns the ``Walls``, then ``confine_sandbox`` (file system, user, Landlock). In
the fork of each test case: ``confine_program`` (limits, system call filter). A wall is one of these
layers; one that the kernel does not grant leaves a note in ``Walls`` unless another covers for it. ``box`` is
the sandbox's directory.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from contextlib import suppress

from bapo_megatron.reward.sandbox import file_system, system_calls

LIBC = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522

OUTPUT_BYTES = 8 << 20
"""Maximum output, and maximum file size, of a case."""

STACK_BYTES = 64 << 20
"""Stack size of a tested program's main thread: allows the recursion limit of tests, even through C code."""

TASKS = 128
"""Maximum number of threads of a tested program, including the sandbox's three processes."""

_NOBODY = 65534

_ALL_USERS = 4294967295
"""Number of users that the kernel's first user namespace maps."""


class Walls:
    """Walls (isolation layers) that this kernel grants a sandbox, and notes on missing ones."""

    def __init__(self) -> None:
        self.namespaces = False
        self.own_user = False
        """Whether it has its own user or user namespace, so that the kernel counts only its threads."""
        self.own_root = False
        self.landlock = False
        self.filter: bytes | None = None
        self.notes: list[str] = []
        """Missing walls, as text for the user."""

    @property
    def hold(self) -> bool:
        """Whether any of them stands between a program and the machine."""
        return self.own_root or self.landlock or self.filter is not None


def enter_namespaces(box: str, number: int) -> Walls:
    """Create namespaces for this process's next children (no network, no other processes), and return the
    walls. Root without that permission, as in Docker, first becomes an ordinary user, who may use a user
    namespace. ``box``, ``number``: as in `confine_sandbox`."""
    os.umask(0o022)
    walls = Walls()
    flags = _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNS
    spare = _spare_ids(number) if os.geteuid() == 0 else (0, 0)
    try:
        if not all(spare) or LIBC.unshare(flags) != 0:
            if all(spare):
                _become(walls, box, *spare)
            user, group = os.geteuid(), os.getegid()
            file_system.check(LIBC.unshare(flags | _CLONE_NEWUSER), "unshare")
            _map_user(user, group)
            walls.own_user |= not walls.notes and _linux() >= (5, 14)
        walls.namespaces = True
    except OSError as error:
        walls.notes.append(
            f"no namespaces ({error}): programs see the machine's files, its processes and its network"
        )
    return walls


def _map_user(user: int, group: int) -> None:
    """Write the identity map of the new user namespace; without it no file can be created."""
    LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # a change of user blocks writes there
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user or _NOBODY} {user} 1"),
        ("gid_map", f"{group or _NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _linux() -> tuple[int, ...]:
    release = os.uname().release.split("-")[0].split(".")
    return tuple(int(part) for part in release[:2] if part.isdigit())


# --- once for each sandbox -----------------------------------------------------------------------


def confine_sandbox(walls: Walls, box: str, readable: list[str], number: int) -> None:
    """Put up the walls that all programs of a sandbox share, around this process and its children. Sets a
    root with ``box`` and the ``readable`` paths, an unprivileged user if this one is root, no capabilities,
    and Landlock. ``number``: unique among the machine's current sandboxes."""
    user, group = _spare_ids(number) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    if walls.namespaces and walls.own_user and not _threads_are_counted():
        walls.own_user = False
        walls.notes.append("nothing counts the programs' threads: this machine's root has no other user here")
    if walls.namespaces:
        try:
            file_system.pivot_to_own_root(box, readable, user, group)
            walls.own_root = True
        except OSError as error:
            walls.notes.append(f"no file system of its own ({error}): programs see the machine's files")
    if walls.namespaces and user != os.geteuid():  # without namespaces it was tried before
        _become(walls, box, user, group)
    file_system.check(LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    file_system.check(LIBC.capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)), "capset")
    be_untraceable()
    walls.landlock = file_system.confine(box, ["/"] if walls.own_root else readable, file_system.DEVICES)
    if not (walls.landlock or walls.own_root):
        walls.notes.append("no Landlock (Linux 5.13): programs read and write files as the run's user")
    if problem := system_calls.problem():
        walls.notes.append(problem)
    else:
        walls.filter = system_calls.program(os.uname().machine, not walls.own_root)


def _spare_ids(number: int) -> tuple[int, int]:
    """Return unused user and group ids; root's own where its user namespace maps no others."""
    spare = []
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            first, _, count = map(int, file.read().split()[-3:])
        last = (1 << 31) - 1 if count == _ALL_USERS else first + count - 1
        spare.append(last - 1 - number % (1 << 22) % (count // 2) if count > 3 else 0)
    return spare[0], spare[1]


def _threads_are_counted() -> bool:
    """Whether the kernel limits the threads of this process's user; it does not limit the machine's root."""
    with open("/proc/self/uid_map") as file:
        if file.read().split()[1:2] != ["0"]:
            return True
    asked = os.fork()
    if not asked:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        with suppress(OSError):
            if not (made := os.fork()):
                os._exit(0)
            os.waitpid(made, 0)
            os._exit(0)
        os._exit(1)
    return os.waitpid(asked, 0)[1] != 0


def _become(walls: Walls, box: str, user: int, group: int) -> None:
    groups = os.getgroups()
    try:
        if not walls.own_root:
            os.chown(box, user, group)
        os.setgroups([])
        os.setresgid(group, group, 0)
        os.seteuid(user)
        for path in (os.__file__, *file_system.packages(), box):
            os.stat(path)
            if not os.access(path, os.R_OK, effective_ids=True):
                raise PermissionError(f"{path} is not readable for all users")
        os.seteuid(0)
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        walls.own_user = True
    except OSError as error:
        os.seteuid(0)
        for restore, values in ((os.setresgid, (0, 0, 0)), (os.setgroups, (groups,))):
            with suppress(OSError):
                restore(*values)
        walls.notes.append(f"programs run as root, and nothing counts their threads: {error}")
        with suppress(OSError):
            os.chown(box, 0, 0)


def be_untraceable() -> None:
    """Prevent other processes from tracing this one and from reading its memory and environment."""
    LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


# --- for each program ----------------------------------------------------------------------------


def confine_program(walls: Walls, memory_mb: int, cpu_s: int) -> None:
    """Confine this process, the fork of a test case, permanently. Raises OSError if a wall fails."""
    file_system.check(LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")
    _limit(walls, memory_mb, cpu_s)
    if walls.filter is not None:
        system_calls.install(walls.filter)


def _limit(walls: Walls, memory_mb: int, cpu_s: int) -> None:
    memory = memory_mb << 20
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: OUTPUT_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if walls.own_user or walls.filter is None:  # without a filter it also stops a fork bomb
        limits[resource.RLIMIT_NPROC] = TASKS
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
