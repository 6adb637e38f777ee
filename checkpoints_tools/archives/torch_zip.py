"""Reader of ``torch.save`` archives without torch: finds tensors in a file, without reading their elements.

``read_archive`` returns the object with a ``StoredTensor`` for each tensor. An archive is a zip file:
``data.pkl`` describes the objects, ``data/0``, ``data/1``, ... hold the tensors' storages, uncompressed. It
may be a whole file, or one of many in a torch_dist file. A damaged one raises CheckpointError.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from bapo_megatron.errors import CheckpointError
from bapo_megatron.runtime.files import COPY_AGAIN
from checkpoints_tools.archives.pickle_allow_list import (
    DTYPE_BYTES,
    MOST_PICKLE_BYTES,
    PickledObject,
    load_pickle,
)

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_PICKLE = "data.pkl"
_MOST_DIMENSIONS = 64  # as torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in an archive, whose elements are not read: file, byte position, type, shape and strides."""

    file: Path
    position: int
    """Byte position of its first element in the file."""
    dtype: str
    """Type, by safetensors' name."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in elements, one per dimension."""

    @property
    def contiguous(self) -> bool:
        """Whether the elements are stored in the order of their indices."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage in the archive's file, of which tensors are views: position, type, number of elements."""

    position: int
    dtype: str
    elements: int


def read_archive(stream: BinaryIO, file: Path, name: str, start: int = 0, length: int | None = None) -> Any:
    """Return the object in the archive at bytes ``start`` to ``start + length`` of ``stream``, opened from
    ``file``, with StoredTensors for tensors. ``name`` describes the archive in errors. Raises CheckpointError
    for an archive that is truncated, damaged, compressed, of another byte order, or that names a class that
    no checkpoint needs."""
    source = f"{file}: {name}"
    length = os.fstat(stream.fileno()).st_size - start if length is None else length
    damaged = (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, ValueError)
    try:
        window = io.BufferedReader(_Window(stream.fileno(), start, length), 4096)
        with zipfile.ZipFile(window) as archive:
            return _MemberReader(archive, window, file, source, start, length).read()
    except (*damaged, OverflowError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{source} is not an archive of torch.save, or is truncated or damaged ({error}); {COPY_AGAIN}"
        ) from None


def read_tensor(stream: BinaryIO, file: Path, name: str, start: int, length: int) -> StoredTensor:
    """Return the one tensor in an archive, as ``read_archive``. Raises CheckpointError for anything else."""
    value = read_archive(stream, file, name, start, length)
    if not isinstance(value, StoredTensor):
        raise CheckpointError(f"{file}: {name} should be a tensor, but its archive holds something else")
    return value


class _MemberReader:
    """Reader of one archive: ``read`` returns its object, with StoredTensors in place of tensors."""

    def __init__(
        self, archive: zipfile.ZipFile, window: BinaryIO, file: Path, source: str, start: int, length: int
    ) -> None:
        self.window, self.file, self.source, self.start, self.length = window, file, source, start, length
        self.archive = archive
        self.members = {member.filename: member for member in archive.infolist()}
        roots = [name[: -len(_PICKLE)] for name in self.members if name.endswith(f"/{_PICKLE}")]
        if len(roots) != 1:
            raise CheckpointError(f"{source} is not an archive of torch.save: it has {len(roots)} {_PICKLE}")
        self.root = roots[0]
        self._done: dict[int, tuple[Any, Any]] = {}

    def read(self) -> Any:
        order = self._content("byteorder", b"little")
        if order != b"little":
            raise CheckpointError(f"{self.source} has byte order {order!r}; only little is supported")
        data = self._content(_PICKLE)
        return self._tensors(load_pickle(data, self.source, self._storage))

    def _content(self, name: str, default: bytes | None = None) -> bytes:
        if default is not None and self.root + name not in self.members:
            return default
        if self._payload(name).file_size > MOST_PICKLE_BYTES:
            raise CheckpointError(f"{self.source}: member {name} is too long to be a description: damaged")
        return self.archive.read(self.root + name)

    def _payload(self, name: str) -> zipfile.ZipInfo:
        """Return the zip member ``name``. Raises CheckpointError if it is missing or compressed."""
        member = self.members.get(self.root + name)
        if member is None:
            raise CheckpointError(f"{self.source} has no member {name}: it is damaged")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise CheckpointError(f"{self.source}: member {name} is compressed, which torch.save never does")
        return member

    def _storage(self, identifier: Any) -> _Storage:
        match identifier:
            case ("storage", str(dtype), str(key), _, int(elements)) if dtype in DTYPE_BYTES:
                pass
            case _:
                raise CheckpointError(f"{self.source} describes a storage in an unknown way")
        member = self._payload(f"data/{key}")
        self.window.seek(member.header_offset)
        header = self.window.read(_LOCAL_HEADER.size)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        position = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if signature != b"PK\x03\x04" or position + member.file_size > self.length:
            raise CheckpointError(f"{self.source}: member data/{key} is not where the archive says: damaged")
        if member.file_size != elements * DTYPE_BYTES[dtype]:
            raise CheckpointError(
                f"{self.source}: storage {key} has {member.file_size} bytes; {elements} elements of {dtype} "
                f"take {elements * DTYPE_BYTES[dtype]}"
            )
        return _Storage(self.start + position, dtype, elements)

    def _tensors(self, value: Any) -> Any:
        """Return ``value`` with StoredTensors in place of pickled ones. Shared parts stay shared."""
        if not isinstance(value, PickledObject | dict | list | tuple):
            return value
        if id(value) not in self._done:
            # Keeps the original alive: a deleted object's id could be reused.
            self._done[id(value)] = value, self._with_tensors(value)
        return self._done[id(value)][1]

    def _with_tensors(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._tensors(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._tensors(inner) for inner in value)
        if value.class_name == "torch._utils._rebuild_tensor_v2":
            return self._tensor(value.arguments)
        if value.class_name == "torch._utils._rebuild_parameter" and value.arguments:
            return self._tensors(value.arguments[0])
        return value

    def _tensor(self, arguments: tuple[Any, ...]) -> StoredTensor:
        match arguments:
            case (_Storage() as storage, int(offset), tuple(shape), tuple(stride), *_) if (
                offset >= 0 and len(shape) == len(stride) and is_shape(shape) and is_shape(stride)
            ):
                pass
            case _:
                raise CheckpointError(f"{self.source} describes a tensor in an unknown way")
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if prod(shape) and last >= storage.elements:
            raise CheckpointError(
                f"{self.source}: a tensor of shape {list(shape)} reaches beyond its storage of "
                f"{storage.elements} elements"
            )
        position = storage.position + offset * DTYPE_BYTES[storage.dtype]
        return StoredTensor(self.file, position, storage.dtype, shape, stride)


def is_shape(value: Any) -> bool:
    """Whether ``value`` is a tuple of non-negative integers: a shape, strides or offsets of a tensor."""
    return (
        isinstance(value, tuple)
        and len(value) <= _MOST_DIMENSIONS
        and all(type(number) is int and 0 <= number < 2**62 for number in value)
    )


class _Window(io.RawIOBase):
    """File object over a byte range of a file, for zipfile; does not move the file's own position."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._length = descriptor, start, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if position < 0:
            raise OSError(f"position {position} before the beginning")  # as a file would
        self._position = position
        return position

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        data = os.pread(self._descriptor, count, self._start + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
