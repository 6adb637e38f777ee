"""Machine checks of ``bapo doctor``: shared memory, disk, code sandbox. Read-only.

``machine_rows`` yields the rows of memory and disk, ``sandbox_rows`` the sandbox's. The run's file system may
hang, so it is read in a child process with a deadline.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bapo_megatron.commands.doctor.rows import DoctorRow, one_line
from bapo_megatron.runtime.child_process import within

SECTION = "machine"
DISK_DEADLINE_S = 10.0
"""Deadline for file system calls, seconds: a network file system whose server is gone never answers."""
SHARED_MEMORY_MB = 1024
"""Smallest sufficient /dev/shm, which NCCL and gloo use; containers have 64 MB by default."""
_GB = 1e9


def machine_rows(directory: Path, needed_gb: float | None = None) -> Iterator[DoctorRow]:
    """Yield the rows of memory and disk; ``directory`` is the run directory, which grows to ``needed_gb``."""
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


def disk_rows(directory: Path, needed_gb: float | None = None) -> Iterator[DoctorRow]:
    """Yield rows of the run directory's disk: free space for ``needed_gb`` (None: unknown), write access."""
    name, least = f"disk of {directory}", (needed_gb or 0) * _GB
    needed = "" if needed_gb is None else f"{_size(least)}, for checkpoints, weights and rollouts"
    kept = "checkpoint.keep_last, rollout.keep_steps"
    fix = f"free some, keep fewer ({kept}), or name another disk with --run-dir"
    try:
        existing, free, writable = within(DISK_DEADLINE_S, lambda: _look_at(directory))
        short, found = free < least, f"{_size(free)} free"
        if short and (own := within(DISK_DEADLINE_S, lambda: _held(directory))):
            # A resumed run has already written part of what it needs.
            short, found = free + own < least, f"{found}, and {_size(own)} of this run there"
    except OSError as error:
        yield DoctorRow(SECTION, name, "problem", one_line(error), needed, "name another disk with --run-dir")
        return
    yield DoctorRow(SECTION, name, "problem" if short else "ok", found, needed, fix)
    if not writable:
        found, needed = f"{existing} may not be written to", "a folder to write to"
        yield DoctorRow(SECTION, name, "problem", found, needed, "name another with --run-dir")


def _look_at(directory: Path) -> tuple[Path, int, bool]:
    path = directory.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return existing, shutil.disk_usage(existing).free, os.access(existing, os.W_OK | os.X_OK)


def _held(folder: Path) -> int:
    """Return the size of a folder's files in bytes; 0 if it is absent."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # the run may be deleting old files
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _size(count: float) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{count / 1e6:.0f} MB"


def sandbox_rows() -> Iterator[DoctorRow]:
    """Yield the row of the code sandbox's missing isolation layers ("walls" in its documentation); a recipe
    whose reward needs them has a problem of its own."""
    from bapo_megatron.reward.sandbox.sandbox import FIX, SandboxError, sandbox_notes

    try:
        lacks = "; ".join(sandbox_notes())
    except SandboxError as error:
        lacks = one_line(error)
    found, needed = one_line(lacks or "all stand"), "for code rewards, else reward.allow_weak_sandbox=True"
    yield DoctorRow("code sandbox", "walls", "optional" if lacks else "ok", found, needed, FIX)
