"""Streams of named weights: validation, and the safetensors writer of the disk sync, for several processes.

``checked_weights`` validates a stream of (name, tensor) while yielding it; ``write_shards`` writes a stream,
or one writer's share of it, to files and returns their contents. A safetensors file
(https://github.com/huggingface/safetensors) is an eight-byte length of a JSON header, the header, which may
end in spaces, then the tensors' bytes without gaps. The header contains each tensor's offset, so it is
written last, into reserved space. (Exports are written by ``checkpoint/export.py``.)
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SHARD_BYTES = 2**30
_HEADER_BYTES = 2**18
_MOST_TENSORS = 1000
"""Maximum tensors per file: the header has room for that many entries with names of up to 128 characters."""

SAFETENSORS_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


class WrittenShard(NamedTuple):
    """Content of a complete weight file: its bytes, and the names of its tensors."""

    nbytes: int
    tensors: tuple[str, ...]


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a stream's ``weights``, validated, without second names of tied tensors, which are optional.

    ``aliases``: from a second name to the tensor's own. Raises ValueError for a tensor that is unknown,
    duplicate, misshapen, different from its tied tensor, or (at the end) missing.
    """
    seen: set[str] = set()
    tied: dict[str, Tensor] = {}
    for name, tensor in weights:
        own = aliases.get(name, name)
        if own not in shapes:
            raise ValueError(f"the model has no weight {name}")
        if name in seen:
            raise ValueError(f"weight {name} was given twice")
        if tuple(tensor.shape) != shapes[own]:
            raise ValueError(
                f"weight {name} has shape {list(tensor.shape)}; the model's is {list(shapes[own])}"
            )
        seen.add(name)
        if own in aliases.values():
            if own not in tied:
                tied[own] = tensor.detach().clone()
            if not torch.equal(tied[own], tensor):
                raise ValueError(
                    f"weight {name} differs from what the model ties it to: {own} and its other names"
                )
        if name == own:
            yield name, tensor
    if missing := sorted(shapes.keys() - seen):
        raise ValueError(f"{len(missing)} weights are missing: {', '.join(missing[:5])}")


def write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, writer: int = 0, writers: int = 1
) -> dict[str, WrittenShard]:
    """Write ``weights``, or one writer's share, to files of about 1 GiB; return their contents.

    The files are ``model-00000.safetensors`` onwards; a writer's have the numbers ``writer`` modulo
    ``writers``. The index, which covers all writers' files, is not written. Each tensor is written before the
    next is asked for. Raises ValueError for an unsupported dtype.
    """
    shards: list[_Shard] = []
    try:
        for name, tensor in weights_of_writer(weights, writer, writers):
            if tensor.dtype not in SAFETENSORS_TYPES:
                known = ", ".join(SAFETENSORS_TYPES.values())
                raise ValueError(f"weight {name} is of {tensor.dtype}; model weights are {known}")
            if not shards or not shards[-1].has_room(tensor.dtype):
                if shards:
                    shards[-1].complete()
                shards.append(_Shard(folder / f"model-{writer + len(shards) * writers:05d}.safetensors"))
            shards[-1].add(name, tensor)
        if shards:
            shards[-1].complete()
    finally:
        if shards:
            shards[-1].file.close()  # after an error without a header: no loader accepts it
    return {shard.path.name: shard.content for shard in shards}


def weights_of_writer(
    weights: Iterable[tuple[str, Tensor]], writer: int, writers: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield one writer's tensors: each tensor goes to the writer with the fewest bytes so far. All writers
    see the same weights, so each tensor has one writer. Their bytes differ by at most the largest tensor."""
    shares = [0] * writers
    for name, tensor in weights:
        owner = shares.index(min(shares))
        shares[owner] += tensor.nbytes
        if owner == writer:
            yield name, tensor


class _Shard:
    """One safetensors file during writing: its header in memory, its tensors' bytes on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("wb")
        self.file.seek(8 + _HEADER_BYTES)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0

    def has_room(self, dtype: torch.dtype) -> bool:
        """Whether the file is below its size limit and the tensor would be aligned: loaders memory-map it."""
        is_small = self._end < _SHARD_BYTES and len(self._header) <= _MOST_TENSORS
        return is_small and self._end % dtype.itemsize == 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor's bytes."""
        self._header[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + tensor.nbytes],
        }
        self._end += tensor.nbytes
        host = tensor.detach().cpu().contiguous()
        # Not by numpy(), after which a storage cannot be resized: an offloaded policy resizes its own.
        self.file.write((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))

    def complete(self) -> None:
        """Write the header and close the file."""
        header = json.dumps(self._header).encode().ljust(_HEADER_BYTES)
        with self.file:
            if len(header) > _HEADER_BYTES:
                raise ValueError(f"{self.path}: the names of its tensors are too long for the header")
            self.file.seek(0)
            self.file.write(_HEADER_BYTES.to_bytes(8, "little") + header)

    @property
    def content(self) -> WrittenShard:
        tensors = tuple(name for name in self._header if name != "__metadata__")
        return WrittenShard(8 + _HEADER_BYTES + self._end, tensors)
