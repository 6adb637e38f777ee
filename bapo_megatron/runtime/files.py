"""Atomic and durable file writes (temporary file, fsync, rename), and safe reads and openings of files.

After ``write_atomically`` a file has its old content or all of the new, even if the process or machine dies
meanwhile; it raises OSError if it cannot write. ``file_inside`` returns the path of a file in a folder that
others may have made (checkpoint, model) and raises CheckpointError for a special file or a link out of the
folder, except from a Hugging Face cache snapshot to its blobs; ``read_file_inside`` returns the content.

A run directory belongs to its user: most of its files are opened without these checks;
``others_may_write`` returns a warning if other users may write there.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from bapo_megatron.errors import CheckpointError, ConfigError

COPY_AGAIN = "copy it again from where it is whole, or take another checkpoint"
"""Advice about a damaged checkpoint file; ends a message."""

FETCH_LFS = "is a pointer of git-lfs, not the file itself: `git lfs pull` in that folder fetches it"
"""Message about such a weight file."""

MOST_DESCRIPTION_BYTES = 1 << 26
"""Size limit, bytes, of files that describe other files (a manifest, an index)."""

CHAT_TEMPLATES = "additional_chat_templates"
"""Folder in a model folder where transformers keeps all chat templates but the first."""

_READ_BYTES = 1 << 20

_MOST_PARTS = 1024
"""Most buffers per ``writev`` call (IOV_MAX of Linux)."""


def write_atomically(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Write ``content`` (text as UTF-8) atomically and durably: ``path`` has its old content or all the new.

    The folder must exist. A crash leaves at most a hidden ``*.tmp`` file there.
    """
    if isinstance(content, str):
        content = content.encode()
    parts = [content] if isinstance(content, bytes) else content
    # Not tempfile: only the owner can read its files, and run directories are shared.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a power failure could leave an empty file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def file_time(folder: Path) -> float:
    """Return the current time by the clock that stamps files in ``folder``, in seconds since 1970.

    A file server's clock may be minutes off this machine's, so file ages need it. Briefly creates an unnamed
    or temporary file; falls back to this machine's clock if that fails.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".clock-") as file:
            os.utime(file.fileno())  # NFS asks its server for the time
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def sha256_of(path: Path, done: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the SHA-256 of a file in hexadecimal, in bounded memory. ``done`` receives bytes read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            done(len(data))
    return digest.hexdigest()


def check_output_file(flag: str, path: Path) -> None:
    """Raise ConfigError if the output file ``path``, the value of ``flag``, cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: the folder {folder} does not exist; make it, or name another file")
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: {folder} cannot be written to; name a file in another folder")


def append_whole(file: FileIO, parts: Iterable[bytes | memoryview], size: int) -> int:
    """Append ``parts``, uncopied, all or nothing to a file of ``size`` bytes; return the number of bytes. On
    an error, cuts the file back to ``size`` and raises OSError."""
    rest: list[memoryview] = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    appended = 0
    try:
        while rest:
            written = os.writev(file.fileno(), rest[:_MOST_PARTS])
            appended += written
            whole = 0
            while whole < len(rest) and written >= len(rest[whole]):
                written -= len(rest[whole])
                whole += 1
            del rest[:whole]
            if written:  # the disk took only part of it
                rest[0] = rest[0][written:]
    except OSError:
        file.truncate(size)
        raise
    return appended


def remove_folder(path: Path, ignore_errors: bool = False) -> None:
    """Delete a folder and its content, if it exists; a link is only unlinked, a plain file stays."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=ignore_errors)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that creations, renames and deletions in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """fsync a file written by another program, so that it survives a power failure."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a git-lfs pointer, which a clone without git-lfs has in place of weights."""
    with path.open("rb") as file:
        return file.read(32).startswith(b"version https://git-lfs")


def file_inside(folder: Path, name: str) -> Path:
    """Return the safe path of the file ``name`` in a checkpoint or model folder; it may be missing.

    A link may lead to a file in the same folder, or from a Hugging Face hub cache snapshot to that cache's
    blobs (``snapshots/REVISION/NAME -> ../../blobs/DIGEST``). Raises CheckpointError for a name with a folder
    in it, any other link, and a special file (opening a FIFO would block forever).
    """
    path = folder / name
    try:
        if not name or "\0" in name or Path(name).name != name:
            raise CheckpointError(f"{folder} names {name[:200]!a}, which is not a file of the folder")
        if path.is_symlink() and not _may_lead(folder.resolve(), path.resolve()):
            raise CheckpointError(
                f"{path} is a link to {os.readlink(path)[:200]!a}, outside of the folder: name the "
                "folder that holds the file, or make one of plain files (cp -rL; of the hub's models: "
                "hf download MODEL --local-dir FOLDER)"
            )
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a plain file")
    except (OSError, RuntimeError, ValueError) as error:  # an overlong name, circular links, a zero byte
        raise CheckpointError(f"{str(path)[-200:]!a} cannot be a file: {error}") from None
    return path


def read_file_inside(folder: Path, name: str, most_bytes: int = MOST_DESCRIPTION_BYTES) -> bytes:
    """Return the content of the small file ``name`` in a checkpoint or model folder, checked as by
    ``file_inside``.

    Raises FileNotFoundError if it is missing, CheckpointError for a special file or more than ``most_bytes``.
    """
    path = file_inside(folder, name)
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > most_bytes:
        raise CheckpointError(f"{path} is longer than {most_bytes:,} bytes: it is damaged, or another file")
    return data


def file_below(folder: Path, name: str) -> Path:
    """As ``file_inside``, for a ``name`` with folders, as in a manifest: ``policy/.metadata``."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{folder} names {name[:200]!a}, which is not a file below the folder")
    return file_inside(folder / path.parent, path.name)


def check_files_inside(folder: Path) -> None:
    """Check every file of a model ``folder`` and its chat templates by ``file_inside``. Raises
    CheckpointError for a bad one: libraries open whatever they find there."""
    for place in (folder, folder / CHAT_TEMPLATES):
        if place.is_dir():
            if place.is_symlink() and place != folder:
                raise CheckpointError(f"{place} is a link: copy the folder")
            for path in sorted(place.iterdir()):
                if not path.is_dir():
                    file_inside(place, path.name)


def _may_lead(folder: Path, target: Path) -> bool:
    """Whether a link in ``folder`` may lead to ``target``; both resolved."""
    if target.is_relative_to(folder):
        return True
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return snapshots is not None and target.parent == snapshots.parent / "blobs"


def open_lock(path: Path) -> BinaryIO:
    """Open a lock file, created if missing, not truncated. The caller takes the lock (fcntl.flock)."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)


def others_may_write(folder: Path) -> str | None:
    """Return a warning, with the fix, about other users who may write to a run directory; None if nobody may.
    A group with the owner's name is the owner's alone, as in most distributions."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        who = f"belongs to user {status.st_uid}"
    elif status.st_mode & stat.S_IWOTH:
        who = f"may be written by everybody (mode {stat.S_IMODE(status.st_mode):04o})"
    elif status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid):
        who = f"may be written by its group {status.st_gid} (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return None
    return (
        f"{folder} {who}: whoever writes there can stop this run, replace its checkpoints, and by links make "
        f"it write to your other files. Unless you share it on purpose: chmod -R go-w {folder}"
    )


def _is_private_group(group: int, user: int) -> bool:
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(user).pw_name
    except KeyError:
        return False
