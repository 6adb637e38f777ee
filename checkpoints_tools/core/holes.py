"""Holes of sparse files, as the file system tells them: where the next data and the next hole begin.

A copy skips holes, since its output has zeros there already. So nothing may count as a hole by mistake: a
file system that tells of no holes has none, and an error of a failing one is raised. Used by ``copying.py``
and ``output_plan.py``.
"""

from __future__ import annotations

import errno
import os

_NOT_TOLD = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def data_after(descriptor: int, position: int) -> int:
    """The first byte of data from ``position`` on, at most the file's size; OSError if the system fails."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole from here on
            return os.fstat(descriptor).st_size
        if error.errno in _NOT_TOLD:
            return position
        raise


def hole_after(descriptor: int, position: int) -> int:
    """The first byte of a hole from ``position`` on, which is data; at most the file's size. OSError as
    above."""
    try:
        return os.lseek(descriptor, position, os.SEEK_HOLE)
    except OSError as error:
        if error.errno in _NOT_TOLD:
            return os.fstat(descriptor).st_size
        raise
