"""Holes of sparse files: a copy skips them, so one by mistake would be zeros in place of weights."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from checkpoints_tools.core import blocks
from checkpoints_tools.core.copying import OpenFiles

MIB = 1 << 20


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A MiB of data, one of a hole, one of data, one of a hole."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        for place in (0, 2 * MIB):
            file.seek(place)
            file.write(os.urandom(MIB))
        file.truncate(4 * MIB)
    if path.stat().st_blocks * 512 >= path.stat().st_size:
        pytest.skip("this file system has no sparse files")
    return path


def holes_of(path: Path) -> list[bool]:
    """Of each MiB whether it is a hole."""
    with OpenFiles() as files:
        return [files.is_hole(path, place * MIB, MIB) for place in range(4)]


def test_holes_are_holes_and_data_is_data(sparse: Path) -> None:
    assert holes_of(sparse) == [False, True, False, True]
    assert blocks._hole_bytes(sparse) == 2 * MIB
    with OpenFiles() as files:
        assert not files.is_hole(sparse, 3 * MIB, 2 * MIB)  # beyond the end: to be read, and found short


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_tells_of_no_holes_has_none(
    number: int, sparse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that it compresses look sparse; each would be copied as zeros, from beginning to end."""
    fail_with(number, monkeypatch)
    assert holes_of(sparse) == [False] * 4
    assert blocks._hole_bytes(sparse) == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_failing_file_system_is_no_hole(number: int, sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS asks its server where the data is."""
    fail_with(number, monkeypatch)
    with pytest.raises(OSError, match=os.strerror(number)):
        holes_of(sparse)
    with pytest.raises(OSError, match=os.strerror(number)):
        blocks._hole_bytes(sparse)


def fail_with(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def lseek(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(blocks.os, "lseek", lseek)
