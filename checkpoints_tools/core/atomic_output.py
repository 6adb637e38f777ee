"""Output folder of a conversion: the plan of its files (``OutputPlan``), and its atomic appearance.

Within ``atomic_output(output)``, which yields a temporary folder, the caller fills and syncs the plan's
files; at the end the folder is renamed. The next run for the same output recognizes and removes a killed
run's leftovers by their name. A lock file, which NFS can lock unlike a folder, excludes a second run. Call
``check_output`` first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.blocks import BlockTensor
from bapo_megatron.runtime.files import open_lock, sync_file, sync_folder
from bapo_megatron.runtime.written_folders import (
    bring_back,
    check_replaceable,
    is_away,
    new_folder,
    temporary_folder,
    write_mark,
)

WRITER = "bapo-ckpt"
"""Name of these tools in the mark file of their outputs."""

PARTIAL = ".partial"
"""Suffix of data files until all of the output's are complete."""

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file would be larger than the system allows",
}


@dataclass
class OutputPlan:
    """Planned files of an output folder, by their paths in its temporary folder: sizes, tensors as blocks of
    the files, bytes around these, files to copy. A format's writer fills the plan. Then call ``create``, copy
    the tensors or ``write`` each, and call ``complete``. These raise OSError if the disk fails."""

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


def check_output(output: Path, overwrite: bool, sources: list[Path]) -> Path:
    """Return ``output`` as an absolute path. First moves an old output back that a killed run had moved
    aside. Raises ConfigError if it may not be written there."""
    output = output.absolute()
    output = output.parent.resolve() / output.name
    if is_away(output):  # first: the checks must see an output that a killed run moved away
        with _only_writer(output):  # raises if that run is alive
            bring_back(output)
    for source in (source.resolve() for source in sources):
        if output == source or output in source.parents or source in output.parents:
            raise ConfigError(
                f"output {output} and input {source} are, or lie in, one another: choose another"
            )
    check_replaceable(output, WRITER)
    if not overwrite and output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"output {output} exists; --overwrite replaces it")
    return output


def check_space(output: Path, nbytes: int) -> None:
    """Raise ConfigError if ``nbytes`` do not fit beside ``output``."""
    folder = next(parent for parent in output.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ConfigError(
            f"output {output} needs {nbytes:,} bytes and {folder} has {free:,} free: make room, or write "
            "elsewhere"
        )


@contextmanager
def atomic_output(output: Path) -> Iterator[Path]:
    """Context manager of the temporary folder; renamed to ``output`` at the end, deleted after an error.
    ``output``, from ``check_output``, may hold a checkpoint to be replaced. Raises ConfigError if the disk is
    full, or another process is writing the same output."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(output):
        try:
            with new_folder(output, WRITER) as folder:
                yield folder
                write_mark(folder, WRITER)  # before the rename: an output without its mark is never replaced
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise ConfigError(
                f"{_FULL[error.errno]}: output {output} was not written, and nothing of it was left"
            ) from error


@contextmanager
def _only_writer(output: Path) -> Iterator[None]:
    """Hold the lock of ``output``, a file beside it, or raise ConfigError if another process does."""
    path, folder = output.with_name(f".{output.name}.bapo.lock"), temporary_folder(output)
    in_use = ConfigError(f"another process is writing {folder}: wait for it, or end it")
    with open_lock(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use from None
        except OSError as error:  # Lustre mounted without flock
            if folder.exists():
                raise ConfigError(
                    f"{folder} is there, and the file system cannot lock files ({error.strerror}): if no "
                    "other process is writing it, delete it"
                ) from None
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(lock.fileno())):
            raise in_use  # the writer before has just deleted this file, and another may have made its own
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
