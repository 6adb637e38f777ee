"""Asynchronous checkpoint writing: a forked process writes a torch_dist checkpoint while training continues.

While it is under way the host holds a copy of the GPU's tensors, in blocks.
(Megatron's own copies are a pinned allocation for each tensor, which torch rounds up to a power of two and
keeps for the next one of that size: 1.8 times the bytes of Qwen2.5-32B at TP 8, beside an offloaded policy.)
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
from bapo_megatron.runtime.guards import OutOfMemoryError, death
from bapo_megatron.runtime.processes import die_with_parent

BLOCK = 2**28
"""Size of a block of host memory in bytes, a power of two: that of an offloaded policy's blocks, too."""
_ALIGNMENT = 512


class BackgroundSave:
    """The asynchronous write of a checkpoint by a forked process; implements ``interfaces.Saving``.

    Construction forks, after a copy of the GPU's tensors to host memory; ``is_written`` is local, ``finish``
    collective. A fork sees CPU tensors as they were (copy on write). The copies of GPU tensors are pinned,
    and a fork shares pinned memory: they are kept until the writer has ended, because torch would reuse their
    blocks while they are being written.
    """

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
        """Whether this rank's part is on disk, or has failed."""
        ended = bool(self._caller.is_current_async_call_done(no_dist=True))
        if ended:
            self._staged.clear()
        return ended

    def finish(self) -> None:
        """Commit the checkpoint, when all ranks' parts are written. Collective; raises if one failed."""
        if self._process is not None and self._process.exitcode:
            why = death(self._process.exitcode)
            raise OutOfMemoryError(f"the process that writes the checkpoint has not finished: {why}")
        for finalize in self._request.finalize_fns:
            finalize()

    def _stage(self, buckets: list[Any]) -> Any:
        """Make the host copies of megatron's ``buckets``, for its writer, and keep them."""
        self._staged.append(staged(buckets))
        if has_cuda():
            torch.cuda.synchronize()  # before the fork, which shares the blocks
        return self._staged[-1]


def staged(buckets: list[Any]) -> list[Any]:
    """Megatron's write buckets with host copies of their GPU tensors. The copies may still be under way."""
    blocks = _Blocks()
    return [
        (file, key, (objects, [(item, blocks.copy(tensor)) for item, tensor in tensors]))
        for file, key, (objects, tensors) in buckets
    ]


class _Blocks:
    """Host memory for copies, pinned if ``_pins``: tensors end to end in blocks, the first with room each.

    The copies keep its blocks alive.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._taken: list[int] = []
        """Bytes of each block that are taken."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy a GPU's tensor to the host; one that is on the host is returned as it is."""
        if is_on_host(tensor):
            return tensor
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        place = self._place(tensor.nbytes)
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        # A storage of its own size: the writer pickles the whole storage of a tensor.
        return torch.from_numpy(place.numpy()).view(tensor.dtype).view(tensor.shape)

    def _place(self, nbytes: int) -> Tensor:
        """Bytes of the first block with room, or of a new one: of ``BLOCK`` bytes, for a larger tensor of the
        next power of two, whose rest others take."""
        number = next(
            (n for n, block in enumerate(self._blocks) if self._taken[n] + nbytes <= len(block)), None
        )
        if number is None:
            size = max(BLOCK, 1 << (nbytes - 1).bit_length())
            number = len(self._blocks)
            self._blocks.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=_pins()))
            self._taken.append(0)
        first = self._taken[number]
        self._taken[number] += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._blocks[number][first : first + nbytes]


@cache
def _pins() -> bool:
    """Whether copies are in pinned memory: beside a GPU, if a fork can read it.

    CUDA promises nothing to a fork. On x86 the driver's mapping is inherited; on GB200 and GB300 Megatron's
    writers were killed as they read it (radixark/Megatron-LM pull request 57, Megatron-Bridge issue 2355).
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
    """Whether a fork of this process can read the byte at ``address``; one that is killed cannot."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            gc.disable()  # as in ``_writer_process``
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(address, 1)
            code = 0
        finally:
            os._exit(code)  # whatever a signal raises here: it must not continue as a second trainer
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor of a save needs no copy: the writer's fork sees it as it is now."""
    return tensor.is_cpu


def replace_results_queue() -> None:
    """Replace megatron's results queue by one in shared memory, before each checkpoint write.

    Megatron's own needs a third process, which takes seconds to start and outlives a killed trainer.
    """
    filesystem_async._results_queue = _Results()


class _Results:
    """A queue of one result in shared memory: the forked writer puts it, this process gets it."""

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
    """The main function of the forked writer process: it and its own forks end with the trainer."""
    # First: collecting the trainer's garbage, such as a store, would wait for threads that a fork lacks.
    gc.freeze()
    _die_with_parent()
    if writer_forks():
        _watch_forks()
    elif arguments and isinstance(arguments[-1], _Results):
        return _write_and_tell(write, *arguments)
    return write(*arguments, **named)


def _write_and_tell(write: Callable[..., Any], *arguments: Any) -> None:
    """Run megatron's writer of threads, and put into its results, the last argument, why one has failed.

    The writer itself ends with an assertion, and says why in a log.
    """
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
    """Let this process end with a fork of megatron's writer that was killed, for which it waits for ever."""
    signal.signal(signal.SIGCHLD, _die_with_child)
    inner = filesystem_async.FileSystemWriterAsync.write_preloaded_data

    def write_alone(*own: Any, **rest: Any) -> Any:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with_parent()
        return inner(*own, **rest)

    filesystem_async.FileSystemWriterAsync.write_preloaded_data = staticmethod(write_alone)


def _die_with_parent() -> None:
    """End with the parent process, and ignore signals that stop a run: the trainer handles them."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def _die_with_child(_number: int, _frame: FrameType | None) -> None:
    """End when a fork was killed, by the kernel when memory is short, say: megatron would wait for ever."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        status = os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None and status.si_code != os.CLD_EXITED:
            os.kill(os.getpid(), signal.SIGKILL)
