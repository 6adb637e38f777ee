"""Weight sync by CUDA IPC for colocated engines (shared memory on a CPU): no copy over network or disk.

``IpcSync`` is the ``WeightSync`` of ``sync=ipc`` (``config/transports.py``). ``push`` only announces a
version; engines read it when they wake, in the GPU hand-over (``trainer/gpu_handover.py``). An all-gather
gives each rank every unsharded tensor. Each rank copies one bucket at a time to shareable memory, and the
engine on its GPU maps this memory through handles and loads the bucket:

    rank of GPU g    bucket -> handles -> rank 0 -> the sampler process -> the engine's process on GPU g

    GPU    CUDA IPC: handle of the allocation, and UUID of the GPU (its number differs between processes)
    CPU    POSIX shared memory, by its name

A handle is torch's pickle of a shared tensor, which SGLang loads with a list of allowed names. On a GPU torch
counts references and would leak memory when a reader dies. Here the engines' answers show when the memory was
read, and readers decrement a dummy counter. The stream is synchronized before a handle is created, so that
readers wait for no CUDA event; torch would open one per handle and close none.

Fallback: if an engine fails to receive, its server is killed, and a new one loads the weights from disk.
"""

from __future__ import annotations

import inspect
import io
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy

from bapo_megatron.interfaces import Policy
from bapo_megatron.rollout.engines.sent_weights import DigestingIterator
from bapo_megatron.rollout.weight_sync.buckets import Bucket, Buckets
from bapo_megatron.rollout.weight_sync.disk import SenderParts
from bapo_megatron.runtime.device import ALLOCATOR_VARIABLE, GROWING_SEGMENTS, environment_variable
from bapo_megatron.runtime.distributed import all_gather, broadcast_from_main, on_all_ranks

if TYPE_CHECKING:
    from bapo_megatron.rollout.sampler.client import SamplerClient

T = TypeVar("T")

_Reader = tuple[str, int]  # a reader of this process's memory: engine name and tensor-parallel rank


class IpcSync:
    """``WeightSync`` by CUDA IPC to colocated engines, which get the weights when they wake.

    ``push`` only announces the weights, and deletes older ones on disk. In the GPU hand-over ``hand_over``
    transfers them and returns the names of the engines that have them. The caller kills the others and calls
    ``write``, which puts the weights on disk for new servers. All three are collective. A failed transfer is
    a run event, not an error.
    """

    def __init__(self, parts: SenderParts) -> None:
        self._disk, self._engines, self._gpus = parts.disk, parts.client, parts.gpus
        self._on_event, self._device = parts.on_event, parts.device
        self._make_digester = parts.make_digester if parts.client is not None else None
        empty = partial(shareable, device=parts.device)
        self._buckets = Buckets(int(parts.engine.bucket_mb * 2**20), parts.device, empty)
        self._step = 0

    def push(self, policy: Policy, step: int) -> None:
        """Announce the weights, the result of ``step``, with which engines will wake."""
        self._step = step
        # Engines are held while the policy trains, so none still loads an earlier version's folder.
        self._disk.discard()
        self._call_engines(lambda engines: engines.expect_handles(policy.version, step))

    def write(self, policy: Policy) -> None:
        """Fallback: write the weights to disk, for engines without them."""
        self._disk.push(policy, self._step)

    def hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        """Transfer the weights to sleeping engines; return, on every rank, the names of those that have them:
        none after an error. These do not sample yet; the caller must kill the others."""
        try:
            return self._hand_over(policy, names)
        except Exception as error:  # any kind: disk is the fallback
            event = {"kind": "handover_failed", "version": policy.version, "reason": str(error)}
            on_all_ranks(lambda: self._on_event(event))
            return []

    def _hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        going = self._call_engines(lambda engines: engines.update("begin", policy.version, names))
        if not going:
            return []
        readers = self._readers(going)
        weights = policy.hf_weights()
        try:
            watched = DigestingIterator(weights, self._make_digester)
            lent = _handles_by_bucket(self._buckets.cut(self._disk.checked(iter(watched))), readers)
            # All ranks in lockstep: a server loads a bucket with the handles of all its GPUs together.
            while going and (parts := on_all_ranks(lambda: next(lent, None)))[0] is not None:
                handles = {reader: handle for some in parts for reader, handle in (some or {}).items()}
                going = self._call_engines(partial(self._deliver, going, handles))
            if not going:
                return []
            return self._call_engines(lambda engines: engines.update("confirm", watched.sent()))
        finally:
            self._buckets.release()
            # Exhausted even after an error, because the other ranks wait in the same all-gathers.
            for _ in weights:
                pass

    def _deliver(
        self, names: Sequence[str], handles: Mapping[_Reader, bytes], engines: SamplerClient
    ) -> list[str]:
        """Send each engine the handles for its ranks; return the names of the engines that loaded them."""
        part = {name: [handles[name, index] for index in range(len(self._gpus[name]))] for name in names}
        return engines.update("receive", part)

    def _call_engines(self, call: Callable[[SamplerClient], T]) -> T:
        """Run ``call`` on rank 0 and return its result on every rank; all raise if it fails."""
        engines = self._engines
        answers: list[Any] = on_all_ranks(lambda: call(engines) if engines is not None else None)
        return answers[0]  # type: ignore[no-any-return]

    def _readers(self, names: Sequence[str]) -> list[_Reader]:
        """Return the readers of this rank's memory: the engine ranks on its GPU. On a CPU rank r stands for
        GPU r, and rank 0 also for GPUs beyond."""
        gpus = broadcast_from_main(dict(self._gpus))
        own = self._device.index if self._device.type == "cuda" else dist.get_rank()
        places = all_gather((socket.gethostname(), own))
        ranks = {gpu: rank for rank, (host, gpu) in reversed([*enumerate(places)]) if host == places[0][0]}
        asked = {gpu for name in names for gpu in gpus[name]}
        if self._device.type != "cuda":
            ranks |= dict.fromkeys(asked - ranks.keys(), 0)
        return [
            (name, index)
            for name in names
            for index, gpu in enumerate(gpus[name])
            if ranks[gpu] == dist.get_rank()
        ]


def _handles_by_bucket(
    buckets: Iterator[Bucket], readers: Sequence[_Reader]
) -> Iterator[dict[_Reader, bytes]]:
    """Yield each bucket's handles by reader. Keeps a bucket's memory until the next is received: a server's
    first rank answers for all its ranks, and others may still read until they join the next call."""
    before: Bucket | None = None
    for bucket in buckets:
        yield {reader: handles_of(bucket.tensors()) for reader in readers}
        before = bucket
    del before


# --- memory handles of tensors --------------------------------------------------------------------


_ARGUMENTS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
"""Argument names with which a reader rebuilds a GPU tensor."""


def shareable(nbytes: int, device: torch.device) -> Tensor:
    """Return an uninitialized uint8 tensor of ``nbytes`` bytes, for ``handles_of``. It is outside expandable
    segments of CUDA's allocator, which readers could map only with ptrace permission."""
    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with _fixed_segments():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def handles_of(named: Sequence[tuple[str, Tensor]]) -> bytes:
    """Return a pickle of names and memory handles of tensors in ``shareable`` memory, for one reader. Waits
    until the GPU has written them. The memory must stay unchanged until the reader has finished."""
    # Readers wait for no event, so the bytes must be written before the handle exists.
    if any(tensor.is_cuda for _, tensor in named):
        torch.cuda.current_stream().synchronize()
    written = io.BytesIO()
    with _shared_by_name():
        _HandlePickler(written).dump([(name, tensor.detach()) for name, tensor in named])
    return written.getvalue()


class _HandlePickler(ForkingPickler):
    """Pickler of tensors as memory handles, with the GPU's UUID instead of its number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = {**self.dispatch_table, Tensor: _reduced}


def _reduced(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if not tensor.is_cuda:
        return rebuild, arguments
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    device = named["storage_device"]
    # Release torch's reference count for this reader, as the reader itself would.
    torch.UntypedStorage._release_ipc_counter_cuda(named["ref_counter_handle"], named["ref_counter_offset"])
    counter, _ = _dummy_counter(device)
    named |= {
        "storage_device": str(torch.cuda.get_device_properties(device).uuid),
        "ref_counter_handle": counter["ref_counter_handle"],
        "ref_counter_offset": counter["ref_counter_offset"],
        "event_sync_required": False,
    }
    return rebuild, tuple(named.values())


@cache
def _dummy_counter(device: int) -> tuple[dict[str, Any], Tensor]:
    """Return the rebuild arguments, by name, of a dummy tensor, and it: as cached, it is never freed."""
    tensor = shareable(4, torch.device("cuda", device))
    _, arguments = reductions.reduce_tensor(tensor)
    return dict(zip(_ARGUMENTS, arguments, strict=True)), tensor


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by name within the block; file descriptors need a socket key that readers lack."""
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)


@contextmanager
def _fixed_segments() -> Iterator[None]:
    """Disable expandable segments of CUDA's allocator within the block."""
    settings = environment_variable(ALLOCATOR_VARIABLE) or (
        environment_variable("PYTORCH_CUDA_ALLOC_CONF") or ""
    )
    if GROWING_SEGMENTS not in settings:
        yield
        return
    set_allocator: Callable[[str], None] = torch._C._accelerator_setAllocatorSettings
    set_allocator(settings.replace(GROWING_SEGMENTS, "expandable_segments:False"))
    try:
        yield
    finally:
        set_allocator(settings)
