"""Safe reader of torch_dist checkpoints for torch's and megatron's loaders: executes no pickle from a file.

``open_stored(folder)`` reads all but sharded tensors and returns a ``StoredCheckpoint``; within
``read_by(stored)`` megatron's load strategies read from it. Torch's and megatron's own readers unpickle
``.metadata``, the common state and every stored object, and a pickle can call any function. This reader
(``checkpoints_tools/archives/``) decodes only plain values and tensor locations, imports nothing, and reads
no file outside the folder. Damaged content or a reference to code raises CheckpointError, but for names on an
allow-list (megatron's, torch's), which become inert ``PickledObject``s. Stored objects are not read.
"""

from __future__ import annotations

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
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bapo_megatron.errors import CheckpointError
from checkpoints_tools.archives.pickle_allow_list import DTYPES
from checkpoints_tools.archives.torch_zip import StoredTensor
from checkpoints_tools.formats.distcp import (
    ChunkFiles,
    GlobalTensor,
    Metadata,
    check_backends,
    read_common,
    read_metadata,
)

_DTYPES = {name: getattr(torch, dtype) for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class StoredCheckpoint:
    """An opened checkpoint: its folder, its metadata (keys, shapes, chunk locations) and its common state as
    plain values. Sharded tensors are not read yet."""

    folder: Path
    metadata: Metadata
    common: dict[str, Any]


def open_stored(folder: Path) -> StoredCheckpoint:
    """Open the checkpoint in ``folder``. CheckpointError names a file that is damaged or refers to code."""
    check_backends(folder)
    metadata = read_metadata(folder)
    return StoredCheckpoint(folder, metadata, read_common(folder, metadata).content)


@contextmanager
def read_by(stored: StoredCheckpoint) -> Iterator[None]:
    """Context manager that patches megatron's load strategy to read ``stored`` with the safe reader."""
    module: Any = megatron_strategy
    usual: Callable[..., Any] = module._get_filesystem_reader
    module._get_filesystem_reader = lambda *_args, **_kwargs: StoredReader(stored)
    try:
        yield
    finally:
        module._get_filesystem_reader = usual


class StoredReader(StorageReader):
    """``StorageReader`` of torch.distributed.checkpoint for an opened checkpoint. Torch calls its methods to
    read metadata and tensors into a model. Raises CheckpointError for damaged content."""

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
        tensors = self._stored.metadata.tensors
        entries: dict[str, Any] = {key: _torch_entry(tensor) for key, tensor in tensors.items()}
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
