"""One gloo device for all process groups of a process.

Else each group has a thread that wakes a hundred times a second: those of a rank's twenty groups take a
fiftieth of a core, and tests run a dozen ranks at a time.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import distributed_c10d

_Gloo: Any = distributed_c10d.ProcessGroupGloo
_device = cache(_Gloo.create_default_device)
"""Made when the first group is: no fork has another process's thread."""


class _OnSharedDevice(_Gloo):  # type: ignore[misc]
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = _Gloo._Options()
        options._devices, options._timeout = [_device()], timeout
        super().__init__(store, rank, size, options)


def share_gloo_device() -> None:
    """For the groups that this process makes from now on."""
    distributed_c10d.ProcessGroupGloo = _OnSharedDevice  # type: ignore[misc]
