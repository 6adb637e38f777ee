"""Asynchronous checkpoint writing: a forked process writes a torch_dist checkpoint while training goes on."""

from __future__ import annotations

import gc
import os
import pickle
import queue
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller

from bapo_megatron.runtime.out_of_memory import OutOfMemoryError, death
from bapo_megatron.runtime.processes import die_with_parent


class BackgroundSave:
    """An asynchronous checkpoint write; implements ``interfaces.Saving``.

    A fork sees tensors on a CPU as they were; those on a GPU are copied to this machine's memory before it.
    Such copies are pinned, and parent and child share pinned memory after a fork: here they are kept until
    the writer has ended, or torch would give their blocks to the next copy while they are written.
    """

    def __init__(self, request: AsyncRequest) -> None:
        self._request = request
        self._staged: list[Any] = []
        if request.preload_fn is not None:
            request = request._replace(preload_fn=partial(self._stage, request.preload_fn))
        self._caller = TemporalAsyncCaller()
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_writer_process, request.async_fn))
        self._caller.schedule_async_call(request)
        self._process = self._caller.process

    def is_written(self) -> bool:
        """Whether this rank's part is on disk, or has failed."""
        ended = bool(self._caller.is_current_async_call_done(no_dist=True))
        if ended:
            self._staged.clear()
        return ended

    def finish(self) -> None:
        """Make the parts a checkpoint, when all are written. Collective; raises if one has failed."""
        if self._process is not None and self._process.exitcode:
            why = death(self._process.exitcode)
            raise OutOfMemoryError(f"the process that writes the checkpoint has not finished: {why}")
        for finalize in self._request.finalize_fns:
            finalize()

    def _stage(self, preload: Callable[[], Any]) -> Any:
        """The copies on the host, kept."""
        self._staged.append(preload())
        return self._staged[-1]


def replace_results_queue() -> None:
    """Give megatron a results queue in shared memory for the next checkpoint write.

    Its own is a third process, which takes seconds to start and outlives a trainer that is killed.
    """
    filesystem_async._results_queue = _Results()


class _Results:
    """A results queue of one object in shared memory: a forked process puts it, this one takes it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("results")

    def put(self, result: Any) -> None:
        with open(os.dup(self._descriptor), "wb") as file:
            pickle.dump(result, file)

    def get_nowait(self) -> Any:
        with open(self._descriptor, "rb") as file:
            file.seek(0)
            try:
                return pickle.load(file)
            except EOFError:
                raise queue.Empty from None


def _writer_process(write: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The writer in the forked process: it and its own forks end when the trainer does."""
    gc.freeze()  # garbage of the trainer, such as a store, may wait for threads that this process has not
    _die_with_parent()
    signal.signal(signal.SIGCHLD, _die_with_child)
    inner = filesystem_async.FileSystemWriterAsync.write_preloaded_data

    def write_alone(*own: Any, **rest: Any) -> Any:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with_parent()
        return inner(*own, **rest)

    filesystem_async.FileSystemWriterAsync.write_preloaded_data = staticmethod(write_alone)
    return write(*arguments, **named)


def _die_with_parent() -> None:
    """End with the parent process, and ignore the signals that stop a run: the trainer handles them."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def _die_with_child(_number: int, _frame: FrameType | None) -> None:
    """End when a fork was killed, as the kernel does where memory is short: megatron would wait for ever."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        found = os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None and found.si_code != os.CLD_EXITED:
            os.kill(os.getpid(), signal.SIGKILL)
