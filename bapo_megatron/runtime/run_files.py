"""Safe opening of files in a run directory: no link is followed, no FIFO waited for; else ConfigError.

A link could lead a log, a lock or a picture to any file of the user. The run directory itself may be a link.
So may its large folders, if they lead to folders that belong to the user and that others may not write to.
Used throughout the package.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, NoReturn

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.run_paths import RunPaths


def open_plain(path: Path, flags: int) -> int:
    """Descriptor of a plain file, opened without following a link (O_NOFOLLOW) or waiting (O_NONBLOCK).

    ConfigError for a link or a special file; OSError of os.open otherwise.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
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
    """A plain file, open for reading; ConfigError and OSError as of ``open_plain``."""
    return open(open_plain(path, os.O_RDONLY), "rb")


def open_lock(path: Path) -> BinaryIO:
    """A lock file, open, created if it is missing, not truncated. The caller takes the lock (fcntl.flock)."""
    return open(open_plain(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)


def check_no_links(root: Path) -> None:
    """ConfigError if a file or folder that the run at ``root`` writes is a link, a FIFO or a device.

    ``root`` may be a link. So may the folders of its checkpoints, exports, weights, logs and TensorBoard, if
    they lead to a folder that belongs to the user and that others may not write to. What is in checkpoints
    and exports has rules of its own (``files.file_inside``).
    """
    paths = RunPaths(root)
    large = (
        paths.checkpoints,
        paths.step_exports,
        paths.export,
        paths.weights,
        paths.tensorboard,
        paths.logs,
    )
    folders = (
        *(paths.journal, paths.report, paths.logs, paths.evaluation, paths.tensorboard, paths.profile),
        paths.trackers,
    )
    for path in vars(paths).values():
        if path != root and not (path in large and _is_own_folder(path)):
            _check_plain(path)
    for folder in folders:
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                _check_plain(path)


def _is_own_folder(path: Path) -> bool:
    """Whether ``path`` leads to a folder of this user that others may not write to."""
    try:
        status = path.stat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH
    )


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
        "the file or folder itself there, or move the whole run directory, which may be a link (checkpoints, "
        "exports, export, weights, tensorboard and logs may be links to folders of yours that others may "
        "not write to)"
    )


def _refuse_special(path: Path) -> NoReturn:
    raise ConfigError(f"{path} is no plain file; delete it, or name another run directory")
