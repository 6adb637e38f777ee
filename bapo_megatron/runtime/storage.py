"""What a run says when its disk is full, or fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed

_FULL = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
"""In words: libraries that write in other processes or languages leave nothing else of an error."""

_FAILING = [os.strerror(number) for number in (errno.EIO, errno.ESTALE, errno.EROFS, errno.ESHUTDOWN)]
"""Of a file system that is not full: a server or a network that may come back (Lustre says ESHUTDOWN)."""

_TORCH = ("inline_container.cc", "iostream error")
"""Torch's writer of archives, which hides what the disk has said."""


_CUT = "a file was cut short"

_ROOM_BYTES = 2**30
"""A disk with so much free is not full: what was cut short there is another failure."""


class DiskError(RunStopped):
    """A file could not be written. Only the process that wrote it knows."""


class FailingDiskError(DiskError, StorageFailed):
    """A file could not be written, though there is room."""


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """A disk that does not take ``what``, which is written to ``path``, ends the run with one message."""
    try:
        yield
    except (ConfigError, Preempted, RunStopped, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if (problem := _problem(error)) is None:
            raise
        for earlier in _chain(error):  # to close what could not be written fails as well
            if isinstance(earlier, RunStopped):
                raise earlier from None
        kind = FailingDiskError if _is_failing(problem, path) else DiskError
        raise kind(f"{what} could not be written to {path}: {problem} ({_room(path)})") from error


def _problem(error: BaseException) -> str | None:
    """What the disk has said, if that is what lies behind ``error``."""
    for one in _chain(error):
        text = str(one)
        for problem in _FULL + _FAILING:
            if problem in text:
                return problem
        if any(words in text for words in _TORCH):
            return _CUT
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _is_failing(problem: str, path: Path) -> bool:
    """Whether ``problem`` is of a file system that fails, not of one that is full."""
    if problem != _CUT:
        return problem in _FAILING
    try:
        found = _statistics(path)
    except OSError:
        return True
    return found.f_bavail * found.f_frsize > _ROOM_BYTES and found.f_favail > 0


def _statistics(path: Path) -> os.statvfs_result:
    """Of the file system of ``path``, which need not exist. OSError if it fails."""
    there = path.absolute()
    while True:
        try:
            return os.statvfs(there)
        except FileNotFoundError:
            there = there.parent


def _room(path: Path) -> str:
    """How much is free on the file system of ``path``."""
    try:
        found = _statistics(path)
    except OSError as error:
        return f"its file system does not answer: {error.strerror}"
    free_mb = found.f_bavail * found.f_frsize / 2**20
    return f"{free_mb:,.0f} MB and {found.f_favail:,} files are free there now"
