"""What a run says when its disk is full, or fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo_megatron.errors import ConfigError, RunStopped

_ERRORS = [
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE)
]
"""In words: libraries that write in other processes or languages leave nothing else of an error."""

_TORCH = ("inline_container.cc", "iostream error")
"""Torch's writer of archives, which hides what the disk has said."""


class DiskError(RunStopped):
    """A file could not be written. Only the process that wrote it knows."""


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """A disk that does not take ``what``, which is written to ``path``, ends the run with one message."""
    try:
        yield
    except (ConfigError, RunStopped, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if (problem := _problem(error)) is None:
            raise
        for earlier in _chain(error):  # to close what could not be written fails as well
            if isinstance(earlier, RunStopped):
                raise earlier from None
        raise DiskError(f"{what} could not be written to {path}: {problem} ({_room(path)})") from error


def _problem(error: BaseException) -> str | None:
    """What the disk has said, if that is what lies behind ``error``."""
    for one in _chain(error):
        text = str(one)
        for problem in _ERRORS:
            if problem in text:
                return problem
        if any(words in text for words in _TORCH):
            return "a file was cut short"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _room(path: Path) -> str:
    """How much is free on the file system of ``path``, which need not exist."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    try:
        found = os.statvfs(there)
    except OSError as error:
        return f"its file system does not answer: {error.strerror}"
    free_mb = found.f_bavail * found.f_frsize / 2**20
    return f"{free_mb:,.0f} MB and {found.f_favail:,} files are free there now"
