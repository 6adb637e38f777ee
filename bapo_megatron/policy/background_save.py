"""A torch_dist checkpoint that a forked process writes, from a copy of the weights or of their pages."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from torch import multiprocessing


class BackgroundSave:
    """Implements ``interfaces.Saving``. A fork sees tensors on a CPU as they were; those on a GPU are copied
    to this machine's memory before it."""

    def __init__(self, request: AsyncRequest) -> None:
        self._request = request
        self._caller = TemporalAsyncCaller()
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_with_parent, request.async_fn))
        self._caller.schedule_async_call(request)

    def is_written(self) -> bool:
        """Whether this rank's part is on disk, or has failed."""
        return bool(self._caller.is_current_async_call_done(no_dist=True))

    def finish(self) -> None:
        """Make the parts a whole, when all are written. Collective; raises if one has failed."""
        for finalize in self._request.finalize_fns:
            finalize()


def results_die_with_this_process() -> None:
    """Have megatron pass results through a process that ends with this one, also if it is killed."""
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(_die_with_parent)
        filesystem_async._results_queue = manager.Queue()


def _with_parent(write: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run in the forked process. What nobody waits for any more must not go on writing."""
    _die_with_parent()
    return write(*arguments, **named)


def _die_with_parent() -> None:
    """Also: signals that tell the run to stop are the trainer's business."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
