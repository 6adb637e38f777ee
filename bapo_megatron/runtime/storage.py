"""Disk errors: failed reads and writes become errors that end the run with the right exit code.

``writing`` is a context manager around a write: a full disk becomes a DiskError, exit code 3 (the user makes
room), a failing file system a FailingDiskError, 4 (a job is requeued). ``check_readable`` raises if a
reader's error leaves open what is stored; ``OldFiles`` reports failed deletions, which do not end the run.
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
"""Errors of a failing file system, whose server or network may come back (Lustre reports ESHUTDOWN)."""

_OF_THE_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.ENXIO, errno.EINVAL, errno.EILSEQ),
}
"""Read errors that describe what is there: nothing, a folder, a socket, or an impossible name."""

_NO_RIGHT = (errno.EACCES, errno.EPERM)

_FAILING = [os.strerror(number) for number in _FAILING_NUMBERS]
"""Their messages."""

_TORCH = ("inline_container.cc", "iostream error")
"""Messages of torch's archive writer, which hides the disk's error."""

_CUT = "a file was cut short"

_ROOM_BYTES = 2**30
"""With more free bytes a disk is not full, and a torn archive means a failing file system."""


class DiskError(RunStopped):
    """Raised when a file cannot be written (a full disk) or replaced, only on the rank that writes it. As a
    ``RunStopped``, it ends the run with exit code 3, and the same command continues the run."""


class FailingDiskError(DiskError, StorageFailed):
    """Raised when a failing file system prevents a read, write or deletion. Exit code 4."""


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn a disk error in the block, which writes ``what`` to ``path``, into a DiskError. Other errors pass
    unchanged, including ConfigError, Preempted and RunStopped."""
    try:
        yield
    except (ConfigError, Preempted, RunStopped, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if (problem := _problem(error)) is None:
            raise
        for earlier in _chain(error):  # closing a file after a failed write fails, too; the first counts
            if isinstance(earlier, RunStopped):
                raise earlier from None
        kind = FailingDiskError if _is_failing(problem, path) else DiskError
        raise kind(f"{what} could not be written to {path}: {problem}") from error


def print_kept(_kind: str, *, path: str, reason: str) -> None:
    """Print a warning about something old that could not be deleted."""
    told = f"warning: {path} could not be deleted ({reason}); the next save or start tries again"
    print(told, file=sys.stderr, flush=True)


class OldFiles:
    """Error handling for deletions of what a run no longer needs: a ``with deleting(path)`` block deletes,
    and its OSErrors are only reported.

    Undeletable files stay (a mount point, an immutable file, another user's; on NFS an open file): the run
    continues, the caller retries when it next deletes, and ``report`` is called once per path. Only a failing
    file system ends the run (FailingDiskError, exit code 4).
    """

    def __init__(self, report: Callable[..., object] = print_kept) -> None:
        """``report`` receives the event kind, ``path`` and ``reason``."""
        self._report = report
        self._told: set[Path] = set()

    @contextmanager
    def deleting(self, path: Path) -> Iterator[None]:
        """Context manager: the block deletes ``path``. Raises FailingDiskError if the file system fails,
        since the run's next writes would fail, too; reports any other OSError."""
        try:
            yield
        except OSError as error:
            if (cause := next(filter(is_of_failing_disk, _chain(error)), None)) is not None:
                told = f"what the run needs no more could not be deleted at {path}: {cause.strerror}"
                raise FailingDiskError(told) from error
            if path not in self._told:
                self._report("old_kept", path=str(path), reason=f"{error.strerror or error}")
            self._told.add(path)


def is_of_failing_disk(error: BaseException) -> TypeGuard[OSError]:
    """Whether ``error`` is the system's own report of a failing file system."""
    return isinstance(error, OSError) and error.errno in _FAILING_NUMBERS


def comes_of_failing_disk(error: BaseException) -> bool:
    """Whether a failing file system caused ``error``, for example a ConfigError "cannot be read". A read-only
    file system does not count: a user may have named it."""
    return any(is_of_failing_disk(cause) and cause.errno != errno.EROFS for cause in _chain(error))


def check_readable(error: BaseException, what: str, path: Path) -> None:
    """Raise ConfigError or FailingDiskError if a system error leaves open what is stored.

    For readers of checkpoints and rollouts, which skip damaged or missing files. Missing read permission (or
    an expired NFS ticket) raises ConfigError; anything else (a lost connection, too many open files) raises
    FailingDiskError.
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
        # A bad sector or a server's lost disk persists: only the user may decide to go back.
        raise FailingDiskError(f"{told}; if it stays so, move it away to continue without it") from error


def _problem(error: BaseException) -> str | None:
    """Return the text of the disk error that caused ``error``; None if none did."""
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
    """Whether the file system fails rather than being full. ``path`` need not exist."""
    if problem != _CUT:
        return problem in _FAILING
    existing = path.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        statistics = os.statvfs(existing)
    except OSError:
        return True
    return statistics.f_bavail * statistics.f_frsize > _ROOM_BYTES and statistics.f_favail > 0
