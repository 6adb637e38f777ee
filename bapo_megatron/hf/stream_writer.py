"""The streaming safetensors writer: writes tensor by tensor, so that no more than one tensor is held.

The format (https://github.com/huggingface/safetensors): the length of a JSON header in eight bytes, the
header, which may end in spaces, then the tensors' bytes without gaps. The header says where each tensor
lies, so room is left for it and it is written last. (Exports are written by the safetensors library, which
holds a file's tensors and sorts them.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    weights: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write ``weights`` to ``model-00000.safetensors`` and so on, each of about ``shard_bytes``.

    There is no index: loaders read every file. ValueError for a type that no model has.
    """
    shard, number = None, 0
    try:
        for name, tensor in weights:
            if shard is None or not shard.has_room(tensor, shard_bytes):
                if shard:
                    shard.close()
                shard, number = _Shard(folder / f"model-{number:05d}.safetensors"), number + 1
            shard.add(name, tensor)
    finally:
        if shard:
            shard.close()


class _Shard:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.seek(8 + _HEADER_BYTES)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0

    def has_room(self, tensor: Tensor, shard_bytes: int) -> bool:
        """Whether the file is still small, and the tensor would be aligned: loaders map it into memory."""
        is_small = self._end < shard_bytes and len(self._header) <= _MOST_TENSORS
        return is_small and self._end % tensor.itemsize == 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor."""
        if tensor.dtype not in _TYPES:
            known = ", ".join(_TYPES.values())
            raise ValueError(f"weight {name} is of {tensor.dtype}; model weights are {known}")
        bytes_B = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        self._file.write(bytes_B.numpy().data)
        end = self._end + bytes_B.nbytes
        self._header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, end],
        }
        self._end = end

    def close(self) -> None:
        """Write the header and close the file."""
        header = json.dumps(self._header).encode().ljust(_HEADER_BYTES)
        with self._file:
            if len(header) > _HEADER_BYTES:
                raise ValueError(f"{self._file.name}: the names of its tensors are too long for the header")
            self._file.seek(0)
            self._file.write(_HEADER_BYTES.to_bytes(8, "little") + header)
