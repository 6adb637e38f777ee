"""Disk errors: turns a failed write into a DiskError, of a full disk or a failing file system.

The context manager ``writing`` encloses a write; ``check_readable`` judges an error of a read. Both errors
stop the run with one message: exit code 3, at which the user makes room, or 4, at which a job is requeued.
``OldFiles`` deletes what is old, and ends no run.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed

_FULL = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
"""Messages of a full file system, as texts: libraries that write in other processes lose the errno."""

_FAILING_NUMBERS = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ESHUTDOWN)
"""Errors of a file system that fails: its server or network may come back (Lustre says ESHUTDOWN)."""

_OF_THE_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.ENXIO, errno.EINVAL, errno.EILSEQ),
}
"""Errors of a read that tell what is there: nothing, a folder, a socket, or a name that no file can have."""

_NO_RIGHT = (errno.EACCES, errno.EPERM)

_FAILING = [os.strerror(number) for number in _FAILING_NUMBERS]
"""Their messages."""

_TORCH = ("inline_container.cc", "iostream error")
"""Messages of torch's archive writer, which hides the error of the disk."""

_CUT = "a file was cut short"

_ROOM_BYTES = 2**30
"""Free bytes above which a disk is not full: a torn archive there is a failing file system."""


class DiskError(RunStopped):
    """Full disk: a file could not be written. Only the rank that wrote it raises it.

    A ``RunStopped``: exit code 3, and the same command continues the run.
    """


class FailingDiskError(DiskError, StorageFailed):
    """Failing file system: a file could not be written though the disk has room. Exit code 4."""


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Context manager: turns a disk error in the block, which writes ``what`` to ``path``, into a DiskError.

    Other errors pass, those of the run too (ConfigError, Preempted, RunStopped).
    """
    try:
        yield
    except (ConfigError, Preempted, RunStopped, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if (problem := _problem(error)) is None:
            raise
        for earlier in _chain(error):  # closing a file after a failed write fails as well: the first counts
            if isinstance(earlier, RunStopped):
                raise earlier from None
        kind = FailingDiskError if _is_failing(problem, path) else DiskError
        raise kind(f"{what} could not be written to {path}: {problem} ({_room(path)})") from error


def check_not_failing(error: BaseException, what: str, path: Path) -> None:
    """FailingDiskError if ``error``, met while ``what`` was deleted at ``path``, is of a failing file system.

    For a caller that continues after any other error.
    """
    for cause in _chain(error):
        if is_of_failing_disk(cause):
            raise FailingDiskError(f"{what} could not be deleted at {path}: {cause.strerror}") from error


def print_kept(_kind: str, *, path: str, reason: str) -> None:
    """Warning about something old that could not be deleted."""
    told = f"warning: {path} could not be deleted ({reason}); the next save or start tries again"
    print(told, file=sys.stderr, flush=True)


class OldFiles:
    """Deletion of what a run needs no more: checkpoints, step files, logs, weights, evaluations.

    What cannot be deleted stays (a mount point, an immutable file, another user's; on NFS a file that is
    open), and the run continues. Its caller tries again at its next turn; ``report`` is told once.
    """

    def __init__(self, report: Callable[..., object] = print_kept) -> None:
        """``report``: takes the event's kind, and ``path`` and ``reason``."""
        self._report = report
        self._told: set[Path] = set()

    @contextmanager
    def deleting(self, path: Path) -> Iterator[None]:
        """Context manager for the deletion of ``path`` in its block.

        FailingDiskError for a file system that fails: what the run writes next would fail there, too.
        """
        try:
            yield
        except OSError as error:
            check_not_failing(error, "what the run needs no more", path)
            if path not in self._told:
                self._report("old_kept", path=str(path), reason=f"{error.strerror or error}")
            self._told.add(path)


def is_of_failing_disk(error: BaseException) -> TypeGuard[OSError]:
    """Whether the system itself says with ``error`` that a file system fails."""
    return isinstance(error, OSError) and error.errno in _FAILING_NUMBERS


def comes_of_failing_disk(error: BaseException) -> bool:
    """Whether ``error``, such as a ConfigError "cannot be read", was caused by a file system that fails.

    Not by one that is read-only: a user may have named it.
    """
    return any(is_of_failing_disk(cause) and cause.errno != errno.EROFS for cause in _chain(error))


def check_readable(error: BaseException, what: str, path: Path) -> None:
    """ConfigError or FailingDiskError if ``error`` is one of the system that says nothing of what is stored.

    For readers of checkpoints and rollouts: what is taken for damaged or absent is passed over. Without
    the right to read (also of an expired ticket on NFS) it is a ConfigError; a lost connection, too many open
    files and all else is a FailingDiskError.
    """
    for cause in _chain(error):
        if not isinstance(cause, OSError) or cause.errno is None or cause.errno in _OF_THE_FILE:
            continue
        told = f"{what} could not be read at {path}: {cause.strerror}"
        if cause.errno in _NO_RIGHT:
            raise ConfigError(
                f"{told}. Whether it is whole is unknown: give this user the right to read it, or move it "
                "away to continue without it"
            ) from error
        # A bad sector or a lost disk of a server stays: only the user may decide to go back.
        raise FailingDiskError(f"{told}; if it stays so, move it away to continue without it") from error


def _problem(error: BaseException) -> str | None:
    """Message of the disk error that caused ``error``; None if there is none."""
    for cause in _chain(error):
        text = str(cause)
        for problem in _FULL + _FAILING:
            if problem in text:
                return problem
        if any(words in text for words in _TORCH):
            return _CUT
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_failing(problem: str, path: Path) -> bool:
    """Whether the file system fails, rather than is full."""
    if problem != _CUT:
        return problem in _FAILING
    try:
        statistics = _statistics(path)
    except OSError:
        return True
    return statistics.f_bavail * statistics.f_frsize > _ROOM_BYTES and statistics.f_favail > 0


def _statistics(path: Path) -> os.statvfs_result:
    """statvfs of the file system of ``path``, which need not exist. OSError if the file system fails."""
    existing = path.absolute()
    while True:
        try:
            return os.statvfs(existing)
        except FileNotFoundError:
            existing = existing.parent


def _room(path: Path) -> str:
    """Free space (MB, files) of the file system of ``path``, in words."""
    try:
        statistics = _statistics(path)
    except OSError as error:
        return f"its file system does not answer: {error.strerror}"
    free_mb = statistics.f_bavail * statistics.f_frsize / 2**20
    return f"{free_mb:,.0f} MB and {statistics.f_favail:,} files are free there now"
