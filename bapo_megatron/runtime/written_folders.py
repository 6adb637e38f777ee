"""Safe replacement of output folders: a command replaces only what it wrote, completely or not at all.

For exports, conversions and prepared datasets. ``check_replaceable`` is the preflight: it raises ConfigError
for a folder with anything that the command did not write. ``new_folder`` is the context manager of a write:
it yields a temporary folder and puts it into place by two renames. After a kill between these, the next start
brings the old folder back. ``move_foreign_aside`` renames a folder that may not be replaced.

Exports and conversions have a mark, a file that is written last and lists the other files with their sizes.
Without one, or with anything unlisted, their folder is never replaced or deleted. Copies keep the mark and
are treated like the original. Prepared datasets have none: they are recognized by their file names.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.runtime.files import read_file_inside, sync_file, sync_folder, write_atomically
from bapo_megatron.runtime.run_paths import RunPaths

MARK = ".bapo-written.json"
"""File in a written folder: its writer, and the size of every other file."""

_DELETING = ".deleting-"
"""Suffix, followed by a random number, of folders being deleted."""


def write_mark(folder: Path, writer: str) -> None:
    """Write ``writer``'s mark durably into an otherwise complete folder."""
    entries = sorted(_entries(folder))
    files = {n: path.lstat().st_size for n, path in entries if n != MARK and not path.is_dir()}
    write_atomically(folder / MARK, json.dumps({"written_by": writer, "files": files}, indent=1) + "\n")


def foreign_content(folder: Path, writer: str) -> str | None:
    """Return what ``writer`` did not write into a marked ``folder``, in words; None if nothing. Files deleted
    since do not count: replacing the folder loses nothing more."""
    if (kind := _kind(folder)) is not None:
        return kind
    if not os.path.lexists(folder / MARK):
        return f"has no {MARK}: it was made by something else, or by an earlier version"
    try:
        mark = json.loads(read_file_inside(folder, MARK))
        files: dict[str, Any] = dict(mark["files"])
        by = mark["written_by"]
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"has a {MARK} that cannot be read ({error!s:.200})"
    if by != writer:
        return f"was written by {by!r:.80}, not by {writer}"
    return _unlisted(folder, {**files, MARK: None})


def content_besides(folder: Path, names: set[str]) -> str | None:
    """As ``foreign_content``, for a folder without a mark, whose files all have fixed ``names``."""
    return _kind(folder) or _unlisted(folder, dict.fromkeys(names))


Foreign = Callable[[Path, str], str | None]
"""Returns what a writer did not write into a folder, in words; None if it wrote all of it."""


def check_replaceable(output: Path, writer: str, foreign: Foreign = foreign_content) -> None:
    """Raise ConfigError if an output folder exists and has foreign content."""
    if (why := _foreign_in(output, writer, foreign)) is not None:
        raise ConfigError(
            f"output {output} {why}. {writer} replaces only what it wrote itself: name another folder, or "
            "look what it is, and move it away or remove it yourself"
        )


def _put_in_place(new: Path, output: Path, writer: str, foreign: Foreign) -> None:
    """Replace the folder ``output`` by ``new``: move the old one aside, rename the new, delete the old.

    Raises ConfigError, with the old folder moved back, if it has foreign content. ``bring_back`` repairs a
    kill between the two renames.
    """
    bring_back(output)
    aside = _replaced_folder(output)
    _delete(aside)
    try:
        if os.path.lexists(output) and not _is_empty(output):
            # Renamed before the check: under its old name another program could still change it.
            os.rename(output, aside)
            if (why := foreign(aside, writer)) is not None:
                raise ConfigError(
                    f"output {output} {why}. It was not like that when {writer} began, and is kept as it is"
                )
        os.rename(new, output)
    except BaseException:
        bring_back(output)
        raise
    sync_folder(output.parent)  # make the rename durable before deleting the old output
    _delete(aside)


def is_away(output: Path) -> bool:
    """Whether the old ``output`` has its hidden name and no new one is there: two renames are not done."""
    return os.path.lexists(_replaced_folder(output)) and not os.path.lexists(output)


def bring_back(output: Path) -> None:
    """Rename the old ``output`` back if it is away, after a kill between two renames."""
    if is_away(output):
        os.rename(_replaced_folder(output), output)


def move_foreign_aside(output: Path, writer: str) -> Path | None:
    """Rename ``output`` to a free `.kept-N` name if it has foreign content; return that name or None."""
    if _foreign_in(output, writer, foreign_content) is None:
        return None
    number = 1
    while os.path.lexists(kept := output.with_name(f"{output.name}.kept-{number}")):
        number += 1
    os.rename(output, kept)
    return kept


def temporary_folder(output: Path) -> Path:
    """Return the temporary folder of ``new_folder`` for ``output``."""
    return output.with_name(f".{output.name}.bapo.tmp")


def _replaced_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.bapo.replaced")


@contextmanager
def new_folder(output: Path, writer: str, foreign: Foreign = foreign_content) -> Iterator[Path]:
    """Context manager: the block fills a temporary folder, which is then renamed to ``output`` atomically.
    Replaces an old folder by the same ``writer``. If the block raises, the new folder is deleted."""
    temporary = temporary_folder(output)
    bring_back(output)
    if os.path.lexists(temporary):
        shutil.rmtree(temporary)
    try:
        temporary.mkdir(parents=True)  # a signal may come before this returns
        yield temporary
        for path in temporary.rglob("*"):
            (sync_folder if path.is_dir() else sync_file)(path)
        sync_folder(temporary)
        _put_in_place(temporary, output, writer, foreign)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _foreign_in(folder: Path, writer: str, foreign: Foreign) -> str | None:
    """Return the foreign content of a folder, in words; None if it is missing or empty, too."""
    return foreign(folder, writer) if os.path.lexists(folder) and not _is_empty(folder) else None


def _delete(folder: Path) -> None:
    """Delete one of the writer's own folders, if it exists, and what earlier deletions of it have left.

    Renames it first: what is left of it after a kill, or cannot be deleted (on NFS, a server's open file), is
    in no one's way. The latter is told.
    """
    beginning = folder.name + _DELETING
    if os.path.lexists(folder):
        os.rename(folder, folder.with_name(beginning + uuid.uuid4().hex))
    for path in [path for path in folder.parent.iterdir() if path.name.startswith(beginning)]:
        shutil.rmtree(path, ignore_errors=True)  # follows no links
        if os.path.lexists(path):
            told = f"{path}, an old output, could not be deleted whole: delete it"
            print(told, file=sys.stderr, flush=True)


def _kind(path: Path) -> str | None:
    """Return why ``path`` cannot be an output folder, in words; None if it can."""
    if path.is_symlink() or not path.is_dir():
        return "is a link, a file or a device, not a folder"
    home = Path(os.path.expanduser("~"))
    if path.is_mount() or (home.is_dir() and path.samefile(home)):
        return "is a mount point or your home folder"
    return None


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory, or an evaluation's output for one suite."""
    paths = RunPaths(folder)
    return any(
        os.path.lexists(part) for part in (paths.metrics, paths.journal, paths.checkpoints, paths.lock)
    )


def _is_empty(path: Path) -> bool:
    """Whether ``path`` is an empty folder, usable as output."""
    return _kind(path) is None and not any(path.iterdir())


def _unlisted(folder: Path, files: dict[str, Any]) -> str | None:
    """Return the first foreign entry, in words: not in ``files`` (sizes by path, None: any), or of another
    size."""
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    for name, path in _entries(folder):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and name in folders:
            continue
        shown = ascii(name)[1:-1]
        if name not in files or not stat.S_ISREG(status.st_mode):
            return f"holds {shown}, which was put there by something else"
        if files[name] is not None and status.st_size != files[name]:
            return f"holds {shown}, which was changed since: it had {files[name]} bytes"
    return None


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield every entry below ``folder`` with its relative path; follows no links."""
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place) / name
            yield path.relative_to(folder).as_posix(), path
