"""Host copies of device memory: ``Offload`` of the policy, and the weights of a ``FrozenReference``.

Offload, while colocated engines sample on the policy's GPUs:

    weights, master weights, moments    copied to the host, then freed; a reload restores the same bits
    gradients                           freed; undefined after a reload: an update zeroes them first

Frozen reference, for a forward pass with its weights in the policy's own model:

    swap, forward pass, swap            its weights <-> the policy's, piece by piece, even after an error

So the reference needs only a one-block device buffer and uses the policy's code and layout. Only parameters
are swapped: a forward pass reads nothing else.

Storages are resized and written in place, so all their views stay valid: parameters, megatron's buckets,
``main_grad``, the distributed optimizer's ranges, master weights of float32 models, the host optimizer's
weights. (Megatron's own offloading replaces the tensors, so that float32 master weights would stop being
views of the weights, and pins new host memory each time.)

Host memory is allocated in reusable blocks, sized to a power of two because torch rounds pinned allocations
up to one. A checkpoint's writer process does not read them: it has its own copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.policy.device import has_cuda, release_cached_memory
from bapo_megatron.policy.optimizer import HostAdamW

BLOCK = 2**28
"""Size of a host memory block in bytes, a power of two."""
_ALIGNMENT = 512
"""Alignment in bytes of each storage's copy, torch's on a GPU."""


class Offload:
    """Offload of a rank's model and optimizer: ``offload`` copies their state to the host, frees state and
    gradients on the device, and returns the freed bytes; ``reload`` restores the state bit for bit, not the
    gradients. Local, blocking."""

    def __init__(self, model: Sequence[Any], optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self.host = HostBlocks()
        self._copied: list[Tensor] = []
        """The offloaded storages, as byte tensors, in the order of their host copies."""
        self._freed_gradients: list[Tensor] = []
        """The freed gradient storages, as byte tensors."""
        self._weights_offloaded = False

    def check_loaded(self, what: str, weights_alone: bool = False) -> None:
        """Raise RuntimeError if state needed by ``what`` is offloaded: any state, or the weights alone."""
        if self._weights_offloaded or ((self._copied or self._freed_gradients) and not weights_alone):
            raise RuntimeError(f"{what}: the policy is offloaded; call reload() first")

    def offload(self, keep_weights: bool = False) -> int:
        """Offload the state, except the weights if ``keep_weights``; return the device bytes freed."""
        if self._weights_offloaded:
            return 0
        if not self._copied:
            self._optimizer.zero_grad()
        stays = {_key(data) for data in (*self._copied, *self._freed_gradients)}  # already offloaded
        if keep_weights:
            stays |= {_key(tensor) for tensor in _weights(self._model)}
        leaving = storages_of(state_tensors(self._model, self._optimizer, self._device), stays)
        for data, block in self.host.pieces([*self._copied, *leaving], first=len(self._copied)):
            block.copy_(data, non_blocking=True)
        # Before freeing the storages, which the asynchronous copies read.
        synchronize()
        dropped = storages_of(_gradients(self._model), stays)
        self._copied, self._freed_gradients = [*self._copied, *leaving], [*self._freed_gradients, *dropped]
        self._weights_offloaded = not keep_weights
        for data in (*leaving, *dropped):
            data.untyped_storage().resize_(0)
        parallel_state.get_global_memory_buffer().buffer.clear()
        # Last: other processes can use the freed storages only once torch's cache is empty.
        release_cached_memory()
        return sum(data.numel() for data in (*leaving, *dropped))

    def reload(self) -> None:
        """Reload the state onto the device. No effect if nothing is offloaded. Raises torch.OutOfMemoryError
        if the device has too little memory; the call can be repeated."""
        # Allocate all memory before the first copy and clear the lists after the last, so that a call that
        # runs out of memory can be repeated.
        for data in (*self._copied, *self._freed_gradients):
            data.untyped_storage().resize_(data.numel())
        for data, block in self.host.pieces(self._copied):
            data.copy_(block, non_blocking=True)
        synchronize()
        self._copied, self._freed_gradients, self._weights_offloaded = [], [], False


class FrozenReference:
    """The frozen reference's weights on one rank, in host memory. Local. Within ``loading()`` the caller
    fills the model with the reference's weights; the exit moves them to the host and restores the policy's.
    Within each later ``in_place()`` the model has the reference's weights again."""

    def __init__(self, model: Sequence[Any]) -> None:
        """``model``: this rank's chunks, with weights on the device. Allocates nothing yet."""
        self._storages = storages_of(parameter for chunk in model for parameter in chunk.module.parameters())
        self.host = HostBlocks()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context manager for filling the model; on exit the host holds the reference's weights."""
        for data, block in self.host.pieces(self._storages):
            block.copy_(data, non_blocking=True)
        synchronize()  # the caller may write from the host, outside the device's stream
        try:
            yield
        finally:
            self._swap()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager in which the model has the reference's weights and the host the policy's."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for data, block in self.host.pieces(self._storages):
            leaving = data.clone()
            # Stream order: the block is read before it is written.
            data.copy_(block, non_blocking=True)
            block.copy_(leaving, non_blocking=True)
        synchronize()


class HostBlocks:
    """Host memory for copies of storages: ``pieces`` yields each piece of a storage with its view of a block.
    Blocks are created at first use, kept, and pinned on a GPU machine."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def pieces(self, storages: Sequence[Tensor], first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of the storages from ``first`` on, each with its view of a host block."""
        place = sum(_padded(data.numel()) for data in storages[:first])
        for data in storages[first:]:
            end, start = place + _padded(data.numel()), 0
            while start < data.numel():
                number, offset = divmod(place, BLOCK)
                length = min(data.numel() - start, BLOCK - offset)
                yield data[start : start + length], self._block(number)[offset : offset + length]
                start, place = start + length, place + length
            place = end

    def _block(self, number: int) -> Tensor:
        if number == len(self.blocks):
            self.blocks.append(torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=has_cuda()))
        return self.blocks[number]


def synchronize() -> None:
    """Wait for the device's copies; no effect on a CPU."""
    if has_cuda():
        torch.cuda.synchronize()


def state_tensors(model: Sequence[Any], optimizer: Any, device: torch.device) -> Iterator[Tensor]:
    """Yield the state tensors on ``device``: weights, model buffers, master weights and moments."""
    yield from _weights(model)
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer or isinstance(part.optimizer, HostAdamW):
            continue
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                state = part.optimizer.state.get(master, {}).values()
                yield master
                yield from (value for value in state if isinstance(value, Tensor) and value.device == device)


def bytes_of(tensor: Tensor) -> Tensor:
    """A byte view of a tensor's whole storage."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)


def _weights(model: Sequence[Any]) -> Iterator[Tensor]:
    for chunk in model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield buffer.param_data
        yield from chunk.module.parameters()
        yield from chunk.module.buffers()


def _gradients(model: Sequence[Any]) -> Iterator[Tensor]:
    for chunk in model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield buffer.grad_data


def storages_of(tensors: Iterator[Tensor], but: Collection[int] = ()) -> list[Tensor]:
    """Byte views of the tensors' storages, each once, except the storages in ``but``."""
    first: dict[int, Tensor] = {}
    for tensor in tensors:
        if (key := _key(tensor)) not in but:
            first.setdefault(key, tensor)
    return [bytes_of(tensor) for tensor in first.values()]


def _padded(nbytes: int) -> int:
    """Number of bytes, rounded up to the alignment of copies in a block."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
