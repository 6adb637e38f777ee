"""Atomic and durable file writes: a file is whole or absent, whenever the process or the machine dies."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from bapo_megatron.errors import ConfigError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) so that ``path`` holds either its old content or all of the new.

    The folder must exist. A reader never sees a part, and a crash leaves at most a hidden ``*.tmp``
    file beside it.
    """
    data = content.encode() if isinstance(content, str) else content
    # Not tempfile: it makes files that only their owner can read, and a run directory is shared.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def check_output_file(flag: str, path: Path) -> None:
    """ConfigError if ``path``, which ``flag`` names, cannot be written; asked before a command's work."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: the folder {folder} does not exist; make it, or name another file")
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: {folder} cannot be written to; name a file in another folder")


def append_whole(file: FileIO, content: bytes, size: int) -> None:
    """Append all of ``content`` to a file of ``size`` bytes, or cut it back to ``size`` and raise OSError."""
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError:
        file.truncate(size)
        raise


def sync_folder(folder: Path) -> None:
    """fsync a folder: creations, renames and deletions in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """fsync a file that somebody else wrote: its content survives a power failure."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` that becomes it, durably, at the end of the block that fills it with files.

    A folder that had the name is replaced. If the block raises, the new one is deleted.
    """
    temporary = output.with_name(f".{output.name}.tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _publish(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _publish(temporary: Path, output: Path) -> None:
    for path in temporary.iterdir():
        sync_file(path)
    sync_folder(temporary)
    replaced = output.with_name(f".{output.name}.replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    if output.exists():
        output.rename(replaced)
    temporary.rename(output)
    sync_folder(output.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
