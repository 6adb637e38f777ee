"""Safe reader of torch_dist checkpoints for torch's and megatron's loaders: executes no pickle from a file.

``open_stored(folder)`` reads all but sharded tensors and objects and returns a ``StoredCheckpoint``; within
``read_by(stored)`` megatron's ``dist_checkpointing.load`` reads from it. Torch's and megatron's own readers
unpickle ``.metadata``, the common state and every stored object, and a pickle can call any function. This
reader (``checkpoints_tools/archives/``) decodes only plain values and tensor locations, imports nothing, and
reads no file outside the folder. Damaged content or a reference to code raises CheckpointError, but
for names on an allow-list (megatron's, torch's), which become inert ``PickledObject``s.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as megatron_strategy
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bapo_megatron.errors import CheckpointError
from bapo_megatron.policy.megatron_versions import common_state
from checkpoints_tools.archives.pickle_allow_list import DTYPES, PickledObject
from checkpoints_tools.archives.torch_zip import StoredTensor, read_archive
from checkpoints_tools.formats.distcp import (
    ChunkFiles,
    GlobalTensor,
    Metadata,
    check_backends,
    read_common,
    read_metadata,
)

_DTYPES = {name: getattr(torch, dtype) for dtype, name in DTYPES.items()}
_EXTRA_STATE = "_extra_state"
_MOST_PARTS = 1_000_000
_MOST_TENSOR_BYTES = 1 << 30
"""Size limit of the common state or a stored object, which hold kilobytes of settings and RNG states."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """An opened checkpoint: its folder, its metadata (keys, shapes, chunk locations) and its common state as
    plain values. Sharded tensors and stored objects are not read yet."""

    folder: Path
    metadata: Metadata
    common: dict[str, Any]


def open_stored(folder: Path) -> StoredCheckpoint:
    """Open the checkpoint in ``folder``. CheckpointError names a file that is damaged or refers to code."""
    check_backends(folder)
    metadata = read_metadata(folder)
    common = read_common(folder, metadata)
    file = common.place.file
    check_size(common.content, file)
    return StoredCheckpoint(folder, metadata, _restored(common.content, file))


@contextmanager
def read_by(stored: StoredCheckpoint) -> Iterator[dict[str, Any]]:
    """Context manager that patches megatron's loader to read ``stored`` with the safe reader. Yields extra
    arguments of ``dist_checkpointing.load``, for the common state."""
    module: Any = megatron_strategy
    usual: Callable[..., Any] = module._get_filesystem_reader
    module._get_filesystem_reader = lambda *_args, **_kwargs: StoredReader(stored)
    try:
        with common_state(lambda: {key: _copied(value) for key, value in stored.common.items()}) as arguments:
            yield arguments
    finally:
        module._get_filesystem_reader = usual


class StoredReader(StorageReader):
    """``StorageReader`` of torch.distributed.checkpoint for an opened checkpoint. Torch calls its methods to
    read metadata, tensors and objects into a model. Raises CheckpointError for damaged content, or objects
    that are not plain values."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        tensors = stored.metadata.tensors
        self._chunks = {(key, chunk.offsets): chunk for key, t in tensors.items() for chunk in t.chunks}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader serves one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False, so that torch creates no such reader for a path."""
        return False

    def read_metadata(self) -> TorchMetadata:  # type: ignore[override]
        """Return keys, dtypes, shapes and chunks in the format of torch's planner."""
        metadata = self._stored.metadata
        entries: dict[str, Any] = {key: _torch_entry(tensor) for key, tensor in metadata.tensors.items()}
        entries |= {key: BytesStorageMetadata() for key in metadata.objects}
        return TorchMetadata(entries, storage_data={})

    def set_up_storage_reader(self, metadata: TorchMetadata, is_coordinator: bool) -> None:  # type: ignore[override]
        """Do nothing: the places are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ChunkFiles() as files:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._object(item.storage_index.fqn))
                else:
                    self._read_tensor(item, planner, files)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensor(self, item: ReadItem, planner: LoadPlanner, files: ChunkFiles) -> None:
        key = item.storage_index.fqn
        chunk = self._chunks[key, tuple(item.storage_index.offset or ())]
        tensor = _elements(files.locate(self._stored.metadata.tensors[key], chunk))
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise CheckpointError(
                f"{chunk.place.file}: {key} has shape {list(tensor.shape)}, {list(target.shape)} is asked for"
            )
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _object(self, key: str) -> io.BytesIO:
        """Return a stored object, re-pickled from its plain values because the planner unpickles it."""
        place = self._stored.metadata.objects[key]
        with place.file.open("rb") as stream:
            value = read_archive(stream, place.file, key, place.start, place.length)
        if _EXTRA_STATE in key:
            _check_empty(value, place.file, key)
        check_size(value, place.file)
        _refuse_objects(value, place.file, key)
        buffer = io.BytesIO()
        torch.save(_restored(value, place.file), buffer)
        buffer.seek(0)
        return buffer


def _torch_entry(tensor: GlobalTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(_DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks)


def _elements(stored: StoredTensor) -> Tensor:
    elements = torch.empty(prod(stored.shape), dtype=_DTYPES[stored.dtype])
    with stored.file.open("rb") as file:
        file.seek(stored.position)
        if file.readinto(elements.view(torch.uint8).numpy().data) != elements.nbytes:
            raise CheckpointError(f"{stored.file} ends within a tensor: it is truncated")
    return elements.reshape(stored.shape)


def _restored(value: Any, file: Path) -> Any:
    if isinstance(value, StoredTensor):
        if not value.contiguous:
            raise CheckpointError(f"{file} holds a tensor that is not contiguous, which no writer leaves")
        return _elements(value)
    if isinstance(value, dict):
        return {key: _restored(inner, file) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(inner, file) for inner in value)
    return value


def check_size(value: Any, file: Path) -> None:
    """Raise CheckpointError if a value unfolds too large, against decompression bombs.

    Shared parts count once per reference: a few hundred bytes can encode deeply nested lists that each
    contain another one twice.
    """
    waiting, parts, tensor_bytes = [value], 0, 0
    while waiting:
        item = waiting.pop()
        parts += 1
        if isinstance(item, StoredTensor):
            tensor_bytes += prod(item.shape) * _DTYPES[item.dtype].itemsize
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        if parts > _MOST_PARTS or tensor_bytes > _MOST_TENSOR_BYTES:
            raise CheckpointError(f"{file} unfolds to more than it holds: it is damaged, or made to do harm")


def _copied(value: Any) -> Any:
    """Deep copy of dictionaries and lists, which megatron modifies in place."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _check_empty(value: Any, file: Path, key: str) -> None:
    """Raise CheckpointError unless a layer's extra state is empty: Transformer Engine would unpickle it."""
    for item in value if isinstance(value, list) else [value]:
        if item is not None and not (isinstance(item, StoredTensor) and not prod(item.shape)):
            raise CheckpointError(
                f"{file}: {key} is not empty. Transformer Engine would run the pickle in it; a policy that "
                "is trained here has none"
            )


def _refuse_objects(value: Any, file: Path, key: str) -> None:
    if isinstance(value, PickledObject):
        raise CheckpointError(f"{file}: {key} holds a {value.class_name}, which no policy needs")
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    ):
        _refuse_objects(inner, file, key)
