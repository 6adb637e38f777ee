"""Output folder of a conversion: the plan of its files (``OutputPlan``), and its atomic appearance.

Within ``atomic_output(output)``, which yields a temporary folder, the caller fills and syncs the plan's
files; at the end the folder is renamed. The next run for the same output recognizes and removes a killed
run's leftovers by their name. A lock on the folder excludes a second run where the file system can lock
folders. Call ``check_output`` first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.blocks import BlockTensor
from bapo_megatron.runtime.files import sync_file, sync_folder
from bapo_megatron.runtime.written_folders import (
    bring_back,
    check_aside,
    check_replaceable,
    foreign_content,
    put_in_place,
    write_mark,
)

WRITER = "bapo-ckpt"
"""Name of these tools in the mark file of their outputs."""

PARTIAL = ".partial"
"""Suffix of data files until all of the output's are complete."""

_FOLDER_ALONE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file would be larger than the system allows",
}


@dataclass
class OutputPlan:
    """Planned files of an output folder, by their paths in its temporary folder: sizes, tensors as blocks of
    them, bytes around these, files to copy. A format's writer fills the plan. Then call ``create``, copy the
    tensors or ``write`` each, and call ``complete``. These raise OSError if the disk fails."""

    tensors: dict[str, BlockTensor] = field(default_factory=dict)
    """Tensors by Hugging Face name; their blocks are in files whose names end in ``PARTIAL``."""
    sizes: dict[Path, int] = field(default_factory=dict)
    """Size of each data file in bytes."""
    around: dict[Path, list[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    """Bytes around each file's tensors, such as headers: position, content."""
    copied: dict[Path, Path] = field(default_factory=dict)
    """Files to copy unchanged, with their sources."""
    last: dict[Path, bytes] = field(default_factory=dict)
    """Commit files: small, written in this order after all others are complete. Without them a folder is no
    checkpoint."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        carried = sum(source.stat().st_size for source in self.copied.values())
        return sum(self.sizes.values()) + carried + sum(len(data) for data in self.last.values())

    def create(self) -> None:
        """Create the folders, and the data files at full size with zeros in place of the tensors."""
        for folder in {path.parent for path in (*self.sizes, *self.copied, *self.last)}:
            folder.mkdir(parents=True, exist_ok=True)
        for path, size in self.sizes.items():
            with path.open("xb", buffering=0) as file:
                file.truncate(size)
                for position, data in self.around[path]:
                    _write_all(file.fileno(), data, position)
        for path, source in self.copied.items():
            with source.open("rb") as read, path.open("xb") as written:
                shutil.copyfileobj(read, written, 1 << 20)

    def write(self, name: str, data: memoryview) -> None:
        """Write all bytes of a single-block tensor. Raises ValueError for another number of bytes."""
        tensor = self.tensors[name]
        if data.nbytes != tensor.nbytes:
            raise ValueError(f"tensor {name} has {data.nbytes} bytes, not {tensor.nbytes}")
        [block] = tensor.blocks
        with block.file.open("r+b", buffering=0) as file:
            _write_all(file.fileno(), data, block.position)

    def complete(self) -> None:
        """Sync the data files, rename them, and write the commit files."""
        # This order makes a torn output recognizable: data on disk, then final names, then the files that
        # readers look for, each complete before it has its name; folders last, since they hold the names.
        for path in (*self.sizes, *self.copied):
            sync_file(path)
        for path in self.sizes:
            path.rename(path.with_name(path.name.removesuffix(PARTIAL)))
        for path, data in self.last.items():
            temporary = path.with_name(path.name + PARTIAL)
            temporary.write_bytes(data)
            sync_file(temporary)
            temporary.rename(path)
        for folder in sorted({path.parent for path in (*self.sizes, *self.copied, *self.last)}):
            sync_folder(folder)


def _write_all(descriptor: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count


def temporary_folder(output: Path) -> Path:
    """Return the temporary folder for writing ``output`` before the rename."""
    return output.with_name(f".{output.name}.bapo-ckpt.tmp")


def replaced_folder(output: Path) -> Path:
    """Return the hidden name of the old ``output`` between the two renames that replace it."""
    return output.with_name(f".{output.name}.bapo-ckpt.replaced")


def check_output(output: Path, overwrite: bool, sources: list[Path]) -> Path:
    """Return ``output`` as an absolute path. Raises ConfigError if it may not be written there."""
    output = output.absolute()
    output = output.parent.resolve() / output.name
    _restore(output)  # first: the checks must see an output that a killed run moved away
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
    """Return foreign content of ``folder``, in words; None if these tools wrote all of it."""
    return foreign_content(folder, WRITER)


def check_space(output: Path, nbytes: int) -> int:
    """Return the free bytes for ``output``. Raises ConfigError if ``nbytes`` do not fit."""
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

    ``output``, from ``check_output``, may hold a checkpoint to be replaced. Raises ConfigError if the disk is
    full, or another process is writing the same output.
    """
    folder = temporary_folder(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    lock = _FolderLock(folder)
    try:
        try:
            _begin(folder, lock)
            yield folder
            # Without locks (Lustre mounted without flock) a second run may have cleared the folder and
            # started its own there, whose half-written files this run would publish.
            if not lock.is_ours():
                raise _FolderInUse(folder)
            _publish(folder, output)  # under the lock: a second run must not clear a folder in use
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise ConfigError(
                f"{_FULL[error.errno]}: output {output} was not written, and nothing of it was left"
            ) from error
    except _FolderInUse:
        raise  # the folder belongs to another process and stays
    except BaseException:  # including a signal at any moment
        is_ours = lock.is_ours()  # a second run's folder stays; its clearing may have caused this failure
        lock.release()  # first: _clear takes the lock itself, so no other run starts in the folder
        if is_ours:
            with suppress(_FolderInUse):
                _clear(folder, ignore_errors=True)
        raise
    finally:
        lock.release()


class _FolderInUse(ConfigError):
    """Raised when another process is writing the output folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"another process is writing {folder}: wait for it, or end it")


class _FolderLock:
    """Exclusive lock (flock) on a folder. A signal while it is taken leaks no open descriptor, which would
    hold the lock until the process ends, even against this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[int] = []

    def take(self) -> None:
        """Lock the folder, or raise ``_FolderInUse``."""
        try:
            # One C call: no signal handler runs between opening the folder and recording it.
            self._open.extend(map(os.open, [self._folder], [_FOLDER_ALONE]))
        except FileNotFoundError:
            raise _FolderInUse(self._folder) from None
        except NotADirectoryError:  # also raised for links
            raise ConfigError(
                f"{self._folder}, in which the output is written first, is not a folder: move it away"
            ) from None
        try:
            fcntl.flock(self._open[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise _FolderInUse(self._folder) from None
        except OSError:
            pass  # some network file systems lock no folders; there users must avoid a second run
        # The folder may have been removed, and recreated, between opening and locking.
        if not _is_same_folder(self._folder, self._open[0]):
            self.release()
            raise _FolderInUse(self._folder)

    def is_ours(self) -> bool:
        """Whether the folder is still the locked one; True if none was locked yet."""
        return not self._open or _is_same_folder(self._folder, self._open[0])

    def release(self) -> None:
        """Release the lock if held."""
        while self._open:
            with suppress(OSError):  # already closed if a signal came before the next line
                os.close(self._open[-1])
            self._open.pop()


def _clear(folder: Path, ignore_errors: bool = False) -> None:
    """Remove a killed run's leftovers under the lock, so that no other run starts in the folder."""
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
    except FileExistsError:  # created by a simultaneous run
        raise _FolderInUse(folder) from None
    lock.take()


def _restore(output: Path) -> None:
    """Undo the first of a killed run's two renames, which moved the old ``output`` away. Raises
    ``_FolderInUse`` if that run is alive: between renames it holds the temporary folder's lock."""
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
        if error.errno == errno.ESTALE:  # NFS error for a descriptor whose folder was removed
            return False
        raise


def _publish(folder: Path, output: Path) -> None:
    """Rename the folder to ``output``."""
    write_mark(folder, WRITER)  # before the rename: an output without its mark could not be replaced later
    put_in_place(folder, output, replaced_folder(output), WRITER, foreign)
