"""Streaming safetensors writer: tensor by tensor, by one process or by several that share the work.

The weight sync by disk uses it. The format (https://github.com/huggingface/safetensors): the length of a JSON
header in eight bytes, the header, which may end in spaces, then the tensors' bytes without gaps. The header
has the offset of each tensor, so room is left for it, and it is written last. (Exports use the safetensors
library, which holds a file's tensors in memory and sorts them.)

Used by ``rollout/weight_sync/disk.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.hf.background_copy import BackgroundCopy

_SHARD_BYTES = 2**30
_HEADER_BYTES = 2**18
_MOST_TENSORS = 1000
"""Most tensors of a file: so many entries with names of up to 128 characters fit into the header."""

_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def write_shards(
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    shard_bytes: int = _SHARD_BYTES,
    writer: int = 0,
    writers: int = 1,
) -> dict[str, int]:
    """Write ``weights``, or one writer's share, to files of about ``shard_bytes``; their bytes by name.

    The files are ``model-00000.safetensors`` and so on; those of a writer have the numbers that are
    ``writer`` modulo ``writers``. There is no index: loaders read every file. A thread writes while the
    iterator goes on. ValueError for a type that no model has.
    """
    files = _Files(folder, shard_bytes, writer, writers)
    with BackgroundCopy(files) as copy:
        for name, tensor in weights_of_writer(weights, writer, writers):
            if tensor.dtype not in _TYPES:
                known = ", ".join(_TYPES.values())
                raise ValueError(f"weight {name} is of {tensor.dtype}; model weights are {known}")
            copy.add(name, tensor)
    return files.sizes


def weights_of_writer(
    weights: Iterable[tuple[str, Tensor]], writer: int, writers: int
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one of several writers: each tensor goes to the writer with the fewest bytes so far.

    All writers see the same weights, so that each tensor has one writer. Their bytes differ by at most the
    largest tensor.
    """
    shares = [0] * writers
    for name, tensor in weights:
        owner = shares.index(min(shares))
        shares[owner] += tensor.nbytes
        if owner == writer:
            yield name, tensor


class _Files:
    """Sink of one writer: fills its files one after the other."""

    def __init__(self, folder: Path, shard_bytes: int, writer: int, writers: int) -> None:
        self.sizes: dict[str, int] = {}
        """Sizes of the complete files by name, in bytes."""
        self._folder, self._shard_bytes = folder, shard_bytes
        self._number, self._step = writer, writers
        self._shard: _Shard | None = None

    def begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Begin a tensor, whose bytes follow, in the current file or the next one."""
        if self._shard is None or not self._shard.has_room(dtype, self._shard_bytes):
            self.close()
            self._shard = _Shard(self._folder / f"model-{self._number:05d}.safetensors")
            self._number += self._step
        self._shard.begin(name, dtype, shape)

    def append(self, bytes_B: Tensor) -> None:
        """The next bytes of the tensor that was begun."""
        assert self._shard is not None
        self._shard.append(bytes_B)

    def close(self) -> None:
        """Complete the current file."""
        shard, self._shard = self._shard, None
        if shard is not None:
            self.sizes[shard.path.name] = shard.close()

    def abandon(self) -> None:
        """Leave the current file without a header: no loader takes it."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.abandon()


class _Shard:
    """One safetensors file while it is written: its header in memory, its tensors' bytes on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._file.seek(8 + _HEADER_BYTES)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0

    def has_room(self, dtype: torch.dtype, shard_bytes: int) -> bool:
        """Whether the file is below its size, and the tensor would be aligned: loaders map it into memory."""
        is_small = self._end < shard_bytes and len(self._header) <= _MOST_TENSORS
        return is_small and self._end % dtype.itemsize == 0

    def begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Note a tensor in the header; its bytes follow."""
        end = self._end + torch.Size(shape).numel() * dtype.itemsize
        self._header[name] = {
            "dtype": _TYPES[dtype],
            "shape": list(shape),
            "data_offsets": [self._end, end],
        }
        self._end = end

    def append(self, bytes_B: Tensor) -> None:
        """Write bytes of the tensor that was begun."""
        self._file.write(bytes_B.numpy().data)

    def close(self) -> int:
        """Write the header and close the file; returns its bytes."""
        header = json.dumps(self._header).encode().ljust(_HEADER_BYTES)
        with self._file:
            if len(header) > _HEADER_BYTES:
                raise ValueError(f"{self._file.name}: the names of its tensors are too long for the header")
            self._file.seek(0)
            self._file.write(_HEADER_BYTES.to_bytes(8, "little") + header)
        return 8 + _HEADER_BYTES + self._end

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()
