"""Buckets of weights: runs of bytes of a stated size, each of which one broadcast carries.

Shapes (suffix of a name): ``_B`` bytes of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from bapo_megatron.types import BucketSpec


@dataclass(frozen=True)
class Bucket:
    """One bucket: some tensors as one run of bytes, with their names, types and shapes."""

    spec: BucketSpec
    payload_B: Tensor
    """uint8."""
    is_borrowed: bool
    """The payload is not a copy: it is valid until the weights' iterator moves on."""


class Buckets:
    """The cutter of weights into buckets of at most ``nbytes``, in two buffers of ``device``."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes, self._device = nbytes, device
        self._buffers = (_Buffer(nbytes, device), _Buffer(nbytes, device))

    def cut(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """``weights`` in order.

        A payload is valid until the next but one bucket is asked for: one is sent while the other fills. A
        larger tensor is a bucket of its own that nobody copies. Receivers view each tensor in its type where
        it lies, so a bucket also ends before a tensor that would not be aligned.
        """
        buffers = cycle(self._buffers)
        buffer = next(buffers)
        for each in self._buffers:
            each.begin()  # a cut that was broken off has left something there
        for name, tensor in weights:
            is_large = tensor.nbytes > self._nbytes
            if buffer.names and (is_large or not buffer.has_room(tensor)):
                yield buffer.take()
                buffer = next(buffers)
            if is_large:
                yield _alone(name, tensor, self._device)
            else:
                buffer.add(name, tensor)
        if buffer.names:
            yield buffer.take()

    def release(self) -> None:
        """Free the buffers' memory until it is needed again."""
        for buffer in self._buffers:
            buffer.release()


class _Buffer:
    """One bucket's worth of memory, which exists from the first tensor on."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes, self._device = nbytes, device
        self._memory_B: Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """Begin an empty bucket."""
        self.names: list[str] = []
        self._tensors: list[tuple[str, tuple[int, ...]]] = []
        self._end = 0

    def has_room(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` fits behind the others, aligned for its type."""
        return self._end + tensor.nbytes <= self._nbytes and self._end % tensor.itemsize == 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy ``tensor`` behind the others."""
        if self._memory_B is None:
            self._memory_B = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        place_B = self._memory_B[self._end : self._end + tensor.nbytes]
        place_B.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self.names.append(name)
        self._tensors.append((_type_name(tensor), tuple(tensor.shape)))
        self._end += tensor.nbytes

    def take(self) -> Bucket:
        """Take the bucket of the added tensors; the buffer is empty again, in the same memory."""
        assert self._memory_B is not None
        dtypes, shapes = zip(*self._tensors, strict=True)
        spec = BucketSpec(tuple(self.names), dtypes, shapes, self._end)
        payload_B = self._memory_B[: self._end]
        self.begin()
        return Bucket(spec, payload_B, is_borrowed=False)

    def release(self) -> None:
        """Free its memory."""
        self._memory_B = None


def _alone(name: str, tensor: Tensor, device: torch.device) -> Bucket:
    payload_B = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
    spec = BucketSpec((name,), (_type_name(tensor),), (tuple(tensor.shape),), tensor.nbytes)
    return Bucket(spec, payload_B, is_borrowed=True)


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
