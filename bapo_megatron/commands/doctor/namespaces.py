"""Code sandbox checks of ``bapo doctor``: isolation layers, and the kernel's user and network namespaces.

``python -m bapo_megatron.commands.doctor.namespaces`` enters both namespaces, in a process that then ends,
and prints one JSON object: the error number of each, 0 if it is granted. Used by ``doctor.py``.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from bapo_megatron.commands.doctor.rows import DoctorRow, missing, one_line
from bapo_megatron.runtime.child_process import run_module

SECTION = "code sandbox"
DEADLINE_S = 20.0
# linux/sched.h
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

_SYSCTL = Path("/proc/sys")
_SWITCHES = (
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
"""Settings of the kernel, the value that forbids, and what permits."""


def sandbox_rows(needed: bool, allow_weak: bool, forgeable_rows: int) -> Iterator[DoctorRow]:
    """Rows of the code sandbox.

    ``needed``: the recipe's reward runs programs. ``allow_weak``: it permits missing isolation layers.
    ``forgeable_rows``: rows of its dataset with tests that a program can pass by forging.
    """
    from bapo_megatron.reward.sandbox.sandbox import sandbox_notes

    required = needed and not allow_weak
    yield isolation_row(sandbox_notes, required)
    yield from namespace_rows(required)
    if needed or forgeable_rows:  # forgeable tests are a problem on a sandbox server, too
        yield forgeable_row(forgeable_rows)


def isolation_row(notes: Callable[[], list[str]], required: bool) -> DoctorRow:
    """Row of the sandbox's isolation layers, which its documents call walls: which of them are missing."""
    from bapo_megatron.reward.sandbox.sandbox import FIX, SandboxError

    needed = "else reward.allow_weak_sandbox=True"
    try:
        found = notes()
    except SandboxError as error:
        return DoctorRow(SECTION, "walls", missing(required), one_line(error), needed, FIX)
    if not found:
        return DoctorRow(SECTION, "walls", "ok", "all stand", needed)
    return DoctorRow(SECTION, "walls", missing(required), one_line("; ".join(found)), needed, FIX)


def forgeable_row(rows: int) -> DoctorRow:
    """Row of forgeable tests: dataset rows whose verdict comes from the tested program's own process."""
    if not rows:
        return DoctorRow(SECTION, "tests", "ok", "no row of data.path has a test that a program can forge")
    found = f"rows of data.path with tests that a program can forge: {rows}"
    fix = "leave them out, or write each test as `assert f(x) == literal` (docs/rewards.md#programs)"
    return DoctorRow(SECTION, "tests", "optional", found, "tests that compare plain values", fix)


def namespace_rows(required: bool) -> Iterator[DoctorRow]:
    """Rows of the user and the network namespace. ``required``: the recipe's reward runs programs."""
    child = run_module("bapo_megatron.commands.doctor.namespaces", [], DEADLINE_S)
    try:
        errors = json.loads(child.output)
    except ValueError:
        errors = {"user namespaces": one_line(child.reason()), "network namespaces": one_line(child.reason())}
    for name, error in errors.items():
        yield namespace_row(name, error, required)


def namespace_row(name: str, error: int | str, required: bool, sysctl: Path = _SYSCTL) -> DoctorRow:
    """Row of one namespace. ``error``: 0 if granted, the kernel's error number, or why there is no answer."""
    needed = "to run programs that a model has written"
    if error == 0:
        return DoctorRow(SECTION, name, "ok", "granted", needed)
    found = f"refused: {os.strerror(error)}" if isinstance(error, int) else error
    return DoctorRow(SECTION, name, missing(required), found, needed, _fix(sysctl))


def _fix(sysctl: Path) -> str:
    for setting, forbids, permits in _SWITCHES:
        path = sysctl / setting
        if path.is_file() and path.read_text().strip() == forbids:
            return permits
    return "in a container: docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined"


def try_namespaces() -> dict[str, int]:
    """Error numbers of unshare(2) for both kinds of namespaces."""
    # In this order: the user namespace gives the right to make a network namespace.
    libc = ctypes.CDLL(None, use_errno=True)
    found = {}
    for name, flag in (("user namespaces", _CLONE_NEWUSER), ("network namespaces", _CLONE_NEWNET)):
        found[name] = ctypes.get_errno() if libc.unshare(flag) else 0
    return found


if __name__ == "__main__":
    print(json.dumps(try_namespaces()))
