"""Atomic output folder: it appears whole or not at all.

It is written under a hidden name beside its own and renamed when the block ends, before which the caller
syncs its files. The next run for the same output recognizes the leftovers of a killed run by that name and
removes them. A lock on the folder excludes a second run, where the file system can lock folders. Call
``check_output`` first, then enter ``atomic_output``. Used in ``checkpoint/`` and ``checkpoints_tools/``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.written_folders import (
    bring_back,
    check_aside,
    check_replaceable,
    foreign_content,
    put_in_place,
    write_mark,
)

WRITER = "bapo-ckpt"
"""Name of these tools in the mark file of an output that they wrote."""

_FOLDER_ALONE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file would be larger than the system allows",
}


def temporary_folder(output: Path) -> Path:
    """Temporary folder in which ``output`` is written before it is renamed."""
    return output.with_name(f".{output.name}.bapo-ckpt.tmp")


def replaced_folder(output: Path) -> Path:
    """Hidden name of the old ``output`` between the two renames that replace it."""
    return output.with_name(f".{output.name}.bapo-ckpt.replaced")


def check_output(output: Path, overwrite: bool, sources: list[Path]) -> Path:
    """``output`` as an absolute path. ConfigError if it may not be written there."""
    output = output.absolute()
    output = output.parent.resolve() / output.name
    _restore(output)  # before the checks, which must see an output that a killed run had moved away
    for source in (source.resolve() for source in sources):
        if output == source or output in source.parents or source in output.parents:
            raise ConfigError(
                f"output {output} and input {source} are, or lie in, one another: choose another"
            )
    check_replaceable(output, WRITER, foreign)
    check_aside(output, replaced_folder(output), WRITER, foreign)
    if not overwrite and output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"output {output} exists; --overwrite replaces it")
    return output


def foreign(folder: Path) -> str | None:
    """Description of a foreign file in ``folder``, or of the folder; None if these tools wrote all of it."""
    return foreign_content(folder, WRITER)


def check_space(output: Path, nbytes: int) -> int:
    """Bytes that are free where ``output`` will be. ConfigError if ``nbytes`` do not fit."""
    folder = next(parent for parent in output.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ConfigError(
            f"output {output} needs {nbytes:,} bytes and {folder} has {free:,} free: make room, or write "
            "elsewhere"
        )
    return free


@contextmanager
def atomic_output(output: Path) -> Iterator[Path]:
    """Context manager of the temporary folder; renamed to ``output`` at the end, removed after an error.

    ``output``, as ``check_output`` gives it, may hold a checkpoint that is to be replaced. ConfigError if the
    disk is full, or if another process is writing the same output.
    """
    folder = temporary_folder(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    lock = _FolderLock(folder)
    try:
        try:
            _begin(folder, lock)
            yield folder
            # Without locks (Lustre mounted without flock) a second run may have cleared the folder and begun
            # its own there, whose files, half written, this one would publish.
            if not lock.is_ours():
                raise _FolderInUse(folder)
            _publish(folder, output)  # still under the lock: a second run must not clear a folder in use
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise ConfigError(
                f"{_FULL[error.errno]}: output {output} was not written, and nothing of it was left"
            ) from error
    except _FolderInUse:
        raise  # the folder is another process's, and stays
    except BaseException:  # also a signal, at whatever moment
        is_ours = lock.is_ours()  # a second run's folder stays, whose clearing may be why this one fails
        lock.release()  # first: _clear takes the lock itself, so that no other run begins in the folder
        if is_ours:
            with suppress(_FolderInUse):
                _clear(folder, ignore_errors=True)
        raise
    finally:
        lock.release()


class _FolderInUse(ConfigError):
    """Error of an output folder that another process is writing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"another process is writing {folder}: wait for it, or end it")


class _FolderLock:
    """Exclusive lock (flock) on a folder.

    A signal while it is taken leaks no open descriptor, which would hold the lock until the process ends,
    against this process, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[int] = []

    def take(self) -> None:
        """Lock the folder, or raise ``_FolderInUse``."""
        try:
            # One call in C: no signal handler runs between the opening and the note of it.
            self._open.extend(map(os.open, [self._folder], [_FOLDER_ALONE]))
        except FileNotFoundError:
            raise _FolderInUse(self._folder) from None
        except NotADirectoryError:  # so the system says of links, too
            raise ConfigError(
                f"{self._folder}, in which the output is written first, is no folder: move it away"
            ) from None
        try:
            fcntl.flock(self._open[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise _FolderInUse(self._folder) from None
        except OSError:
            pass  # some network file systems lock no folders; there a second run is the user's to avoid
        # The folder may have been removed, and perhaps made anew, between the opening and the lock.
        if not _is_same_folder(self._folder, self._open[0]):
            self.release()
            raise _FolderInUse(self._folder)

    def is_ours(self) -> bool:
        """Whether the folder is still the one that was taken; True if none was taken yet."""
        return not self._open or _is_same_folder(self._folder, self._open[0])

    def release(self) -> None:
        """Give the lock back, if it is held."""
        while self._open:
            with suppress(OSError):  # closed already, when a signal came before the next line
                os.close(self._open[-1])
            self._open.pop()


def _clear(folder: Path, ignore_errors: bool = False) -> None:
    """Remove the leftovers of a killed run, under the lock, so that no other run begins in the folder."""
    if os.path.lexists(folder):
        lock = _FolderLock(folder)
        try:
            lock.take()
            shutil.rmtree(folder, ignore_errors=ignore_errors)
        finally:
            lock.release()


def _begin(folder: Path, lock: _FolderLock) -> None:
    """Make the folder and lock it."""
    try:
        folder.mkdir()
    except FileExistsError:  # made by one that began at the same moment
        raise _FolderInUse(folder) from None
    lock.take()


def _restore(output: Path) -> None:
    """Undo the first of the two renames of a killed run, which had moved the old ``output`` away.

    ``_FolderInUse`` if that run is alive: between its renames it holds the lock of the temporary folder.
    """
    aside = replaced_folder(output)
    if os.path.lexists(aside) and not os.path.lexists(output):
        folder = temporary_folder(output)
        _clear(folder)
        lock = _FolderLock(folder)
        try:
            _begin(folder, lock)
            bring_back(output, aside)
            shutil.rmtree(folder)
        finally:
            lock.release()


def _is_same_folder(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ESTALE:  # so NFS says of a descriptor whose folder was removed
            return False
        raise


def _publish(folder: Path, output: Path) -> None:
    """Rename the folder to ``output``."""
    write_mark(folder, WRITER)  # before the rename: an output without its mark could not be replaced later
    put_in_place(folder, output, replaced_folder(output), WRITER, foreign)
