"""Weight buckets: byte buffers, each of many tensors, in which the trainer sends weights (broadcast, IPC).

``Buckets.cut(weights)`` packs the tensors of an iterator into ``Bucket`` objects of bounded size, so that a
message carries many tensors without a second copy of the model. Shape suffix: ``_B``, bucket bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from bapo_megatron.types import BucketSpec


@dataclass(frozen=True)
class Bucket:
    """Tensors in one byte buffer, ``payload_B``, with names and layout, ``spec``. From ``Buckets.cut``."""

    spec: BucketSpec
    payload_B: Tensor
    """Shape [B], uint8."""
    is_borrowed: bool
    """Whether the payload is the weight itself, valid until the weights' iterator advances."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        tensors, start = [], 0
        for name, dtype, shape in zip(self.spec.names, self.spec.dtypes, self.spec.shapes, strict=True):
            kind: torch.dtype = getattr(torch, dtype)
            end = start + math.prod(shape) * kind.itemsize
            tensors.append((name, self.payload_B[start:end].view(kind).view(shape)))
            start = end
        return tensors


Allocate = Callable[[int], Tensor]
"""An allocator that returns an uninitialized uint8 tensor of the given bytes."""


class Buckets:
    """Packer of weights into buckets: ``cut`` copies tensors, in order, into two reused byte buffers.

    It sends nothing. The buffers, of ``nbytes`` bytes, are allocated on first use and kept until ``release``.
    An error of a copy is raised only when its bucket is complete.
    """

    def __init__(self, nbytes: int, device: torch.device, allocate: Allocate | None = None) -> None:
        """``allocate``: for every bucket. None: torch's, and a tensor larger than a buffer is not copied."""
        self._nbytes, self._device, self._owns = nbytes, device, allocate is not None
        self._allocate = allocate or partial(torch.empty, dtype=torch.uint8, device=device)
        self._buffers = [_Buffer(nbytes, self._allocate) for _ in range(2)]

    def cut(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """Yield the buckets of ``weights``, in order. A payload is valid until the next bucket but one is
        requested, so that one is sent while the other fills. A tensor larger than a buffer is its own bucket.
        Receivers view tensors in place, so a bucket also ends before a tensor that would be misaligned."""
        buffers = cycle(self._buffers)
        buffer = next(buffers)
        for each in self._buffers:
            each.begin()  # a failed push may have left tensors
        for name, tensor in weights:
            is_large = tensor.nbytes > self._nbytes
            if buffer.names and (is_large or not buffer.has_room(tensor)):
                yield buffer.take()
                buffer = next(buffers)
            if is_large:
                yield self._oversized(name, tensor)
            else:
                buffer.add(name, tensor)
        if buffer.names:
            yield buffer.take()

    def release(self) -> None:
        for buffer in self._buffers:
            buffer.release()

    def _oversized(self, name: str, tensor: Tensor) -> Bucket:
        if self._owns:
            buffer = _Buffer(tensor.nbytes, self._allocate)
            buffer.add(name, tensor)
            return buffer.take()
        payload_B = tensor.detach().to(self._device).contiguous().view(-1).view(torch.uint8)
        spec = BucketSpec((name,), (_type_name(tensor),), (tuple(tensor.shape),), tensor.nbytes)
        return Bucket(spec, payload_B, is_borrowed=True)


class _Buffer:
    """Reusable memory of one bucket: ``add`` tensors while ``has_room``, then ``take`` the bucket."""

    def __init__(self, nbytes: int, allocate: Allocate) -> None:
        self._nbytes, self._allocate = nbytes, allocate
        self._memory_B: Tensor | None = None
        self.begin()

    def begin(self) -> None:
        self._error: Exception | None = None
        self.names: list[str] = []
        self._tensors: list[tuple[str, tuple[int, ...]]] = []
        self._end = 0

    def has_room(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` fits after the others, aligned for its type."""
        return self._end + tensor.nbytes <= self._nbytes and self._end % tensor.itemsize == 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy ``tensor`` after the others. Only ``take`` raises an error of the copy: a rank that stopped
        within a bucket would leave the others waiting in an all-gather."""
        place = slice(self._end, self._end + tensor.nbytes)
        self.names.append(name)
        self._tensors.append((_type_name(tensor), tuple(tensor.shape)))
        self._end = place.stop
        if self._error is None:
            try:
                self._copy(tensor, place)
            except Exception as error:
                self._error = error

    def take(self) -> Bucket:
        """Return the bucket and start an empty one in the same memory. Raises the error of a failed copy."""
        if self._error is not None:
            raise self._error
        assert self._memory_B is not None
        dtypes, shapes = zip(*self._tensors, strict=True)
        spec = BucketSpec(tuple(self.names), dtypes, shapes, self._end)
        payload_B = self._memory_B[: self._end]
        self.begin()
        return Bucket(spec, payload_B, is_borrowed=False)

    def _copy(self, tensor: Tensor, place: slice) -> None:
        if self._memory_B is None:
            self._memory_B = self._allocate(self._nbytes)
        self._memory_B[place].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def release(self) -> None:
        self._memory_B = None


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
