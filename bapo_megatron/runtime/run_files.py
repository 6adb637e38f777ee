"""Files of a run directory: plain files, never links, whoever made the directory.

A link in it could lead a log, a lock or a picture to any file of the user; to open a FIFO waits for ever. The
run directory itself may be a link.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, NoReturn

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.run_paths import RunPaths


def open_plain(path: Path, flags: int, mode: int = 0o666) -> int:
    """The descriptor of a plain file, which opening neither follows a link to nor waits for.

    ConfigError for a link and for what is no plain file; OSError as os.open has it.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            _refuse_link(path)
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV):  # a FIFO that nobody reads, a socket
            _refuse_special(path)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        _refuse_special(path)
    return descriptor


def read_plain(path: Path) -> BinaryIO:
    """A plain file, open for reading."""
    return open(open_plain(path, os.O_RDONLY), "rb")


def open_lock(path: Path) -> BinaryIO:
    """A lock's file, made if it is missing. What stands in it stays."""
    return open(open_plain(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)


def check_no_links(root: Path) -> None:
    """ConfigError if a file or folder that the run at ``root`` writes is a link, a FIFO or a device.

    ``root`` may be a link. Its checkpoints and exports have rules of their own (``files.file_inside``).
    """
    paths = RunPaths(root)
    folders = (paths.journal, paths.report, paths.logs, paths.evaluation, paths.tensorboard, paths.profile)
    for path in vars(paths).values():
        if path != root:
            _check_plain(path)
    for folder in folders:
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                _check_plain(path)


def _check_plain(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        _refuse_link(path)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        _refuse_special(path)


def _refuse_link(path: Path) -> NoReturn:
    raise ConfigError(
        f"{path} is a link to {os.readlink(path)[:200]!a}; links in a run directory are not followed: put "
        "the file or folder itself there, or move the whole run directory, which may be a link"
    )


def _refuse_special(path: Path) -> NoReturn:
    raise ConfigError(f"{path} is no plain file; delete it, or name another run directory")
