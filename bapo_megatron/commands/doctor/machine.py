"""Machine checks of ``bapo doctor``: locked memory, shared memory, disk, code sandbox. Read-only.

``machine_rows`` yields the rows of memory and disk, ``sandbox_rows`` the sandbox's. The run's file system may
hang, so it is read in a child process with a deadline.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from bapo_megatron.commands.doctor.rows import DoctorRow, missing, one_line
from bapo_megatron.runtime.child_process import within

SECTION = "machine"
DISK_DEADLINE_S = 10.0
"""Deadline for file system calls, seconds: a network file system whose server is gone never answers."""
SHARED_MEMORY_MB = 1024
"""Smallest sufficient /dev/shm, which NCCL and gloo use; containers have 64 MB by default."""
_GB = 1e9


def machine_rows(directory: Path, needed_gb: float | None = None) -> Iterator[DoctorRow]:
    """Yield the rows of memory and disk; ``directory`` is the run directory, which grows to ``needed_gb``."""
    yield locked_memory_row(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_infiniband())
    yield shared_memory_row(Path("/dev/shm"))
    yield from disk_rows(directory, needed_gb)


def shared_memory_row(path: Path) -> DoctorRow:
    """Return the row of /dev/shm, which NCCL and gloo use within a machine."""
    fix = f"mount -o remount,size=8G {path}, or docker run --shm-size 8g"
    needed = f"{SHARED_MEMORY_MB / 1024:.0f} GiB, for several processes on GPUs"
    total, _, free = shutil.disk_usage(path)
    enough = free >= SHARED_MEMORY_MB << 20
    found = f"{_size(total)}, {_size(free)} free"
    return DoctorRow(SECTION, str(path), "ok" if enough else "optional", found, needed, fix)


def locked_memory_row(soft: int, infiniband: bool) -> DoctorRow:
    """Return the row of the locked-memory limit; InfiniBand locks the buffers that it registers."""
    if soft == resource.RLIM_INFINITY:
        return DoctorRow(SECTION, "locked memory", "ok", "unlimited")
    found, needed = f"{soft >> 10} KiB", "unlimited, for InfiniBand"
    if not infiniband:
        return DoctorRow(SECTION, "locked memory", "ok", f"{found}; no InfiniBand here", needed)
    fix = "ulimit -l unlimited; under Slurm LimitMEMLOCK=infinity for slurmd"
    return DoctorRow(SECTION, "locked memory", "optional", found, needed, fix)


def has_infiniband(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether the kernel lists an InfiniBand (or RoCE) device."""
    return devices.is_dir() and any(devices.iterdir())


def disk_rows(directory: Path, needed_gb: float | None = None) -> Iterator[DoctorRow]:
    """Yield rows of the run directory's disk: free space for ``needed_gb`` (None: unknown), write access."""
    name, least = f"disk of {directory}", (needed_gb or 0) * _GB
    needed = "" if needed_gb is None else f"{_size(least)}, for checkpoints, weights and rollouts"
    kept = "checkpoint.keep_last, rollout.keep_steps"
    fix = f"free some, keep fewer ({kept}), or name another disk with --run-dir"
    try:
        existing, free, writable = within(DISK_DEADLINE_S, lambda: _look_at(directory))
    except OSError as error:
        yield DoctorRow(SECTION, name, "problem", one_line(error), needed, "name another disk with --run-dir")
        return
    short, found = free < least, f"{_size(free)} free"
    if short and (own := _held(directory)):
        # A resumed run has already written part of what it needs.
        short, found = free + own < least, f"{found}, and {_size(own)} of this run there"
    yield DoctorRow(SECTION, name, "problem" if short else "ok", found, needed, fix)
    if not writable:
        found, needed = f"{existing} may not be written to", "a folder to write to"
        yield DoctorRow(SECTION, name, "problem", found, needed, "name another with --run-dir")


def _look_at(directory: Path) -> tuple[Path, int, bool]:
    path = directory.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return existing, shutil.disk_usage(existing).free, os.access(existing, os.W_OK | os.X_OK)


def _held(folder: Path) -> int:
    """Return the size of a folder's files in bytes; 0 if it is absent or the disk does not answer in time."""

    def size() -> int:
        total = 0
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):  # the run may be deleting old files
                    total += os.lstat(os.path.join(place, name)).st_size
        return total

    try:
        return within(DISK_DEADLINE_S, size)
    except OSError:
        return 0


def _size(count: float) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{count / 1e6:.0f} MB"


# --- the code sandbox ------------------------------------------------------------------------------

SANDBOX = "code sandbox"


def sandbox_rows(needed: bool, allow_weak: bool, forgeable_rows: int) -> Iterator[DoctorRow]:
    """Yield rows of the code sandbox. ``needed``: whether the recipe's reward runs programs. ``allow_weak``:
    whether it accepts missing isolation layers. ``forgeable_rows``: number of dataset rows with a test that a
    program can pass by forging its verdict."""
    from bapo_megatron.reward.sandbox.sandbox import sandbox_notes

    required = needed and not allow_weak
    yield isolation_row(sandbox_notes, required)
    if needed or forgeable_rows:  # forgeable tests matter with a sandbox server, too
        yield forgeable_row(forgeable_rows)


def isolation_row(notes: Callable[[], list[str]], required: bool) -> DoctorRow:
    """Return the row of the sandbox's missing isolation layers ("walls" in its documentation)."""
    from bapo_megatron.reward.sandbox.sandbox import FIX, SandboxError

    try:
        lacks = "; ".join(notes())
    except SandboxError as error:
        lacks = one_line(error)
    needed = "else reward.allow_weak_sandbox=True"
    state = missing(required) if lacks else "ok"
    return DoctorRow(SANDBOX, "walls", state, one_line(lacks or "all stand"), needed, FIX)


def forgeable_row(rows: int) -> DoctorRow:
    """Return the row of forgeable tests, whose verdict comes from the tested program's own process."""
    if not rows:
        return DoctorRow(SANDBOX, "tests", "ok", "no row of data.path has a test that a program can forge")
    found = f"rows of data.path with tests that a program can forge: {rows}"
    fix = "leave them out, or write each test as `assert f(x) == literal` (docs/rewards.md#programs)"
    return DoctorRow(SANDBOX, "tests", "optional", found, "tests that compare plain values", fix)
