"""The policy's memory, given up while engines sample on its GPUs: a copy on the host takes its place.

A tensor is a view of a storage. A storage of size zero has no memory, yet its views remain; when it gets
memory again, wherever that lies, all of them are valid again: parameters, megatron's buckets, ``main_grad``,
the ranges of the distributed optimizer, master weights of float32 models, the host optimizer's weights.

    weights, master weights, moments    copied to the host, freed; the same bits come back
    gradients                           freed; they come back with any values: an update begins with zeros

Megatron's own offloading is not used. It replaces the tensors of masters and moments, so that the masters of
float32 models are views of the model's weights no longer, and pins new host memory each time.

Host memory comes in blocks that are kept for the next time: torch rounds each pinned block up to a power of
two, and these are one. The writer of a checkpoint, a fork, reads none of them: it has copies of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.policy.device import has_cuda, release_cached_memory
from bapo_megatron.policy.host_optimizer import HostAdamW

BLOCK = 2**28
"""Bytes of a block of host memory."""
_ALIGNMENT = 512
"""Each storage's copy begins at a multiple of these bytes: torch's own alignment on a GPU."""


class Offload:
    """The device memory of a model and its optimizer: freed by ``offload``, filled again by ``reload``."""

    def __init__(self, model: Sequence[Any], optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._blocks: list[Tensor] = []
        self._copied: list[Tensor] = []
        """The bytes of each storage whose copy is on the host, in the order of the host's bytes."""
        self._freed_gradients: list[Tensor] = []
        """The bytes of each storage of gradients, while it has no memory."""
        self._weights_offloaded = False
        """Whether the weights, too, have no memory."""

    @property
    def host_bytes(self) -> int:
        """Host memory that the copies have taken, for good."""
        return sum(block.nbytes for block in self._blocks)

    def check_loaded(self, what: str, weights_alone: bool = False) -> None:
        """RuntimeError if memory is given up that ``what`` would read: any, or that of weights alone."""
        if self._weights_offloaded or ((self._copied or self._freed_gradients) and not weights_alone):
            raise RuntimeError(f"{what}: the policy is offloaded; call reload() first")

    def offload(self, keep_weights: bool = False) -> int:
        """Give up the memory, all but the weights' with ``keep_weights``; the bytes that are freed.

        Does nothing where that is given up already.
        """
        if self._weights_offloaded:
            return 0
        if not self._copied:
            self._optimizer.zero_grad()
        stays = {_key(data) for data in (*self._copied, *self._freed_gradients)}  # without memory, most of it
        if keep_weights:
            stays |= {_key(tensor) for tensor in _weights(self._model)}
        leaving = _storages(state_tensors(self._model, self._optimizer, self._device), stays)
        for data, block in self._pieces([*self._copied, *leaving], first=len(self._copied)):
            block.copy_(data, non_blocking=True)
        self._synchronize()
        dropped = _storages(_gradients(self._model), stays)
        self._copied, self._freed_gradients = [*self._copied, *leaving], [*self._freed_gradients, *dropped]
        self._weights_offloaded = not keep_weights
        for data in (*leaving, *dropped):
            data.untyped_storage().resize_(0)
        parallel_state.get_global_memory_buffer().buffer.clear()
        release_cached_memory()
        return sum(data.numel() for data in (*leaving, *dropped))

    def reload(self) -> None:
        """Take the memory back and fill it. Does nothing where it is there.

        torch.OutOfMemoryError if the device has not enough; then it may be called again.
        """
        for data in (*self._copied, *self._freed_gradients):
            data.untyped_storage().resize_(data.numel())
        for data, block in self._pieces(self._copied):
            data.copy_(block, non_blocking=True)
        self._synchronize()
        self._copied, self._freed_gradients, self._weights_offloaded = [], [], False

    def _pieces(self, storages: Sequence[Tensor], first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of the storages from ``first`` on, piece by piece, each with its place on the host."""
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
        """The block of this number, made when it is asked for first."""
        if number == len(self._blocks):
            self._blocks.append(torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=has_cuda()))
        return self._blocks[number]

    @staticmethod
    def _synchronize() -> None:
        if has_cuda():
            torch.cuda.synchronize()


def state_tensors(model: Sequence[Any], optimizer: Any, device: torch.device) -> Iterator[Tensor]:
    """Weights, the model's other tensors, master weights and moments, as far as they are on ``device``."""
    yield from _weights(model)
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer or isinstance(part.optimizer, HostAdamW):
            continue
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                state = part.optimizer.state.get(master, {}).values()
                yield master
                yield from (one for one in state if isinstance(one, Tensor) and one.device == device)


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the storage that a tensor is a view of."""
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


def _storages(tensors: Iterator[Tensor], but: Collection[int] = ()) -> list[Tensor]:
    """The bytes of the tensors' storages, each once, without those of the keys ``but``."""
    first: dict[int, Tensor] = {}
    for tensor in tensors:
        if (key := _key(tensor)) not in but:
            first.setdefault(key, tensor)
    return [bytes_of(tensor) for tensor in first.values()]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
