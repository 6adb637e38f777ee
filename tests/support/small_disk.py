"""Disks that are easily full, or hang, for tests that run as root."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.guardian import unguarded


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """``folder`` with a file system of that size. Skips the test where none can be mounted."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("to mount a small disk needs root: `sudo make test`")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave_kilobytes: int) -> Path:
    """A file that takes all but so much of the disk."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**12))
        except OSError:
            file.truncate(max(0, file.tell() - leave_kilobytes * 2**10))
    return ballast


@contextmanager
def freezable_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """``folder`` with a file system that ``freeze`` can stop. Skips the test where none can be mounted."""
    folder.mkdir()
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(megabytes * 2**20)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
            image.unlink()
            pytest.skip(f"a file system that hangs needs root and a loop device: `{command[0]}` failed")
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], capture_output=True)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        image.unlink()


def freeze(disk: Path, limit_s: float) -> subprocess.Popen[bytes]:
    """Whatever writes to the disk hangs until the process's stdin closes, or for so long.

    So it thaws also if the test is killed, which is why no guardian ends the process.
    """
    script = 'fsfreeze --freeze "$0" && echo frozen && timeout "$1" cat; fsfreeze --unfreeze "$0"'
    process = subprocess.Popen(
        ["sh", "-c", script, str(disk), str(limit_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=unguarded(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"frozen\n"
    return process
