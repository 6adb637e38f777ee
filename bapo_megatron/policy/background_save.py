"""Asynchronous checkpoint writing: a forked process writes a torch_dist checkpoint while training continues.

``BackgroundSave(request)`` copies GPU tensors, starts the write of megatron's save request and returns; poll
``is_written``, then call ``finish``. Call ``replace_results_queue`` before megatron makes the request. During
the write the host holds a copy of the GPU tensors, in pageable memory. (Pinned, as in megatron's own
requests, torch would round each tensor up to a power of two and keep it, and forks of GB200 and GB300 cannot
read it: radixark/Megatron-LM pull request 57, Megatron-Bridge issue 2355.)
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller

from bapo_megatron.policy.megatron_versions import writer_forks
from bapo_megatron.runtime.guards import OutOfMemoryError, death
from bapo_megatron.runtime.processes import die_with_parent


class BackgroundSave:
    """Asynchronous checkpoint write in a forked process; implements ``interfaces.Saving``. The constructor
    copies GPU tensors to host memory, forks and returns; ``is_written`` is local, ``finish`` collective. The
    fork sees host tensors and copies as they were (copy on write)."""

    def __init__(self, request: AsyncRequest) -> None:
        self._request = request
        if request.preload_fn is not None:
            buckets = request.async_fn_args[1]
            copy = partial(filesystem_async.FileSystemWriterAsync.preload_tensors, buckets, False)
            request = request._replace(preload_fn=copy)
        self._caller = TemporalAsyncCaller()
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_writer_process, request.async_fn))
        self._caller.schedule_async_call(request)
        self._process = self._caller.process

    def is_written(self) -> bool:
        """Whether this rank's write has ended, on disk or with a failure."""
        return bool(self._caller.is_current_async_call_done(no_dist=True))

    def finish(self) -> None:
        """Commit the checkpoint once all ranks' parts are written. Collective. Raises if a write failed:
        OutOfMemoryError if this rank's writer process got SIGKILL, RuntimeError if it ended otherwise."""
        if self._process is not None and (code := self._process.exitcode):
            kind, why = OutOfMemoryError if code == -signal.SIGKILL else RuntimeError, death(code)
            raise kind(f"the process that writes the checkpoint has not finished: {why}")
        for finalize in self._request.finalize_fns:
            finalize()


def replace_results_queue() -> None:
    """Replace megatron's results queue by one in shared memory; call before each checkpoint write. Megatron's
    queue needs a third process, which takes seconds to start and outlives a killed trainer."""
    filesystem_async._results_queue = _Results()


class _Results:
    """One-result queue in shared memory: the forked writer puts the result, this process gets it."""

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
    """Main function of the forked writer process, which ends with the trainer, as do its own forks."""
    # First: collecting the trainer's garbage, such as a store, would wait for threads that do not exist in a
    # fork.
    gc.freeze()
    _die_with_parent()
    if writer_forks():
        _watch_forks()
    elif arguments and isinstance(arguments[-1], _Results):
        return _write_and_tell(write, *arguments)
    return write(*arguments, **named)


def _write_and_tell(write: Callable[..., Any], *arguments: Any) -> None:
    """Run megatron's threaded writer; its result, or its first error, goes into the last argument. The writer
    itself fails with an assertion and only logs the cause."""
    *others, results = arguments
    failures: list[Exception] = []
    inner = filesystem_async.FileSystemWriterAsync.write_preloaded_data

    def write_one(*own: Any, **rest: Any) -> Any:
        number, result = inner(*own, **rest)
        if isinstance(result, Exception):
            failures.append(result)
        return number, result

    filesystem_async.FileSystemWriterAsync.write_preloaded_data = staticmethod(write_one)
    told = SimpleNamespace(put=lambda result: results.put(failures[0] if failures else result))
    try:
        write(*others, told)
    except Exception as error:
        told.put(error)


def _watch_forks() -> None:
    """End this process when one of megatron's writer forks is killed: megatron would wait for it forever."""
    signal.signal(signal.SIGCHLD, _die_with_child)
    inner = filesystem_async.FileSystemWriterAsync.write_preloaded_data

    def write_alone(*own: Any, **rest: Any) -> Any:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with_parent()
        return inner(*own, **rest)

    filesystem_async.FileSystemWriterAsync.write_preloaded_data = staticmethod(write_alone)


def _die_with_parent() -> None:
    """Die with the parent process, and ignore signals that stop a run: the trainer handles them."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def _die_with_child(_number: int, _frame: FrameType | None) -> None:
    """Kill this process if a fork was killed, for example by the kernel for lack of memory."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        status = os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None and status.si_code != os.CLD_EXITED:
            os.kill(os.getpid(), signal.SIGKILL)
