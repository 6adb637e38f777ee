"""Asynchronous checkpoint writing: a forked process writes a torch_dist checkpoint while training continues.

``BackgroundSave(request)`` copies GPU tensors, starts the write of megatron's save request and returns; poll
``is_written``, then call ``finish``. Call ``replace_results_queue`` before megatron makes the request. During
the write the host holds a copy of the GPU tensors, in blocks. (Megatron's own copies are one pinned
allocation per tensor, which torch rounds up to a power of two and caches: 1.8 times the bytes of Qwen2.5-32B
at TP 8, beside an offloaded policy.)
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import queue
import resource
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from torch import Tensor

from bapo_megatron.policy.device import has_cuda
from bapo_megatron.policy.megatron_versions import writer_forks
from bapo_megatron.policy.offload import BLOCK, padded
from bapo_megatron.runtime.guards import OutOfMemoryError, death
from bapo_megatron.runtime.processes import die_with_parent


class BackgroundSave:
    """Asynchronous checkpoint write in a forked process; implements ``interfaces.Saving``. The constructor
    copies GPU tensors to host memory, forks and returns; ``is_written`` is local, ``finish`` collective. The
    fork sees CPU tensors as they were (copy on write). Copies of GPU tensors, if pinned, are shared with it:
    this process keeps them until the writer ends, because torch would otherwise reuse the blocks."""

    def __init__(self, request: AsyncRequest) -> None:
        self._request = request
        self._staged: list[Any] = []
        if request.preload_fn is not None:
            request = request._replace(preload_fn=partial(self._stage, request.async_fn_args[1]))
        self._caller = TemporalAsyncCaller()
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_writer_process, request.async_fn))
        self._caller.schedule_async_call(request)
        self._process = self._caller.process

    def is_written(self) -> bool:
        """Whether this rank's write has ended, on disk or with a failure; then also frees the host copies."""
        ended = bool(self._caller.is_current_async_call_done(no_dist=True))
        if ended:
            self._staged.clear()
        return ended

    def finish(self) -> None:
        """Commit the checkpoint once all ranks' parts are written. Collective. Raises if a write failed:
        OutOfMemoryError if this rank's writer process got SIGKILL, RuntimeError if it ended otherwise."""
        if self._process is not None and (code := self._process.exitcode):
            kind, why = OutOfMemoryError if code == -signal.SIGKILL else RuntimeError, death(code)
            raise kind(f"the process that writes the checkpoint has not finished: {why}")
        for finalize in self._request.finalize_fns:
            finalize()

    def _stage(self, buckets: list[Any]) -> Any:
        self._staged.append(staged(buckets))
        if has_cuda():
            torch.cuda.synchronize()  # before the fork, which shares the blocks
        return self._staged[-1]


def staged(buckets: list[Any]) -> list[Any]:
    """Megatron's write buckets with host copies of their GPU tensors. The copies may still be running."""
    blocks = _Blocks()
    return [
        (file, key, (objects, [(item, blocks.copy(tensor)) for item, tensor in tensors]))
        for file, key, (objects, tensors) in buckets
    ]


class _Blocks:
    """Allocator of host copies: tensors end to end in large blocks (first fit), pinned if ``_pins``."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._taken: list[int] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy a GPU tensor to the host and return the copy; return a host tensor unchanged."""
        if is_on_host(tensor):
            return tensor
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        place = self._place(tensor.nbytes)
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        # Its storage has its own size: the writer pickles a tensor's whole storage.
        return torch.from_numpy(place.numpy()).view(tensor.dtype).view(tensor.shape)

    def _place(self, nbytes: int) -> Tensor:
        """``nbytes`` bytes of the first block with room, or of a new one (at least ``BLOCK`` bytes)."""
        number = next(
            (n for n, block in enumerate(self._blocks) if self._taken[n] + nbytes <= len(block)), None
        )
        if number is None:
            size = max(BLOCK, 1 << (nbytes - 1).bit_length())
            number = len(self._blocks)
            self._blocks.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=_pins()))
            self._taken.append(0)
        first = self._taken[number]
        self._taken[number] += padded(nbytes)
        return self._blocks[number][first : first + nbytes]


@cache
def _pins() -> bool:
    """Return whether copies use pinned memory: on a GPU machine where a fork can read it.

    CUDA promises nothing to a fork. On x86 a fork inherits the driver's mapping; on GB200 and GB300 reading
    it killed Megatron's writers (radixark/Megatron-LM pull request 57, Megatron-Bridge issue 2355).
    """
    if not has_cuda():
        return False
    probe = torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True)
    if fork_reads(probe.data_ptr()):
        return True
    text = "a fork of this process cannot read pinned memory: checkpoints are copied to pageable memory"
    print(text, file=sys.stderr, flush=True)
    return False


def fork_reads(address: int) -> bool:
    """Return whether a fork of this process survives reading the byte at ``address``."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            gc.disable()  # as in ``_writer_process``
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(address, 1)
            code = 0
        finally:
            os._exit(code)  # even if a signal raises here: it must not run on as a second trainer
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor needs no copy, because the writer's fork sees its current value."""
    return tensor.is_cpu


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
