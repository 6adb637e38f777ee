"""Metadata files of a torch_dist checkpoint, as bytes to write.

``.metadata`` says where the pieces of each key lie, ``common.pt`` has the state that all ranks share,
``metadata.json`` names the format's backends. For ``torch_dist_writer.py``, ``to_megatron.py`` and
``resharding.py``; the reader, ``distcp.py``, compares the last. Used in ``checkpoints_tools/`` and
``checkpoints_tools/formats/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints_tools.archives.pickle_writer import Call, Instance, Name, dumps
from checkpoints_tools.archives.torch_archive import object_archive

METADATA_JSON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of ``metadata.json``: the format's backends."""
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""The rules by which the keys are made; megatron-core reads it from ``common.pt``."""
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_TORCH_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One archive in a data file, as plain data: a chunk of a tensor, or an object.

    Part of a ``StoredKey``.
    """

    offset: tuple[int, ...] | None
    """The chunk's first element in the tensor; None for an object."""
    size: tuple[int, ...]
    file: str
    position: int
    """Byte in the file at which the archive begins."""
    nbytes: int


@dataclass
class StoredKey:
    """A key of the checkpoint, filled by a planner: its type, its shape and the pieces that hold it.

    Made by ``torch_dist_writer.py``, written by ``metadata``.
    """

    dtype: str | None
    """Type by safetensors' name; None for an object."""
    shape: tuple[int, ...] = ()
    pieces: list[Piece] = field(default_factory=list)


def metadata(stored: Mapping[str, StoredKey]) -> bytes:
    """The bytes of ``.metadata``, as torch 2.6 and newer read it."""
    places = {}
    for key, entry in stored.items():
        for piece in entry.pieces:
            index = {"fqn": key, "index": None, "offset": _size(piece.offset)}
            place = {"relative_path": piece.file, "offset": piece.position, "length": piece.nbytes}
            found = Instance(Name(_METADATA, "MetadataIndex"), index)
            places[found] = Instance(Name(_FILESYSTEM, "_StorageInfo"), place)
    state = {
        "state_dict_metadata": {key: _key_metadata(entry) for key, entry in stored.items()},
        "planner_data": None,
        "storage_data": places,
        "storage_meta": None,
    }
    return dumps(Instance(Name(_METADATA, "Metadata"), state))


def common(arguments: Mapping[str, Any], iteration: int = 0) -> bytes:
    """The bytes of ``common.pt``, with ``arguments`` as those of the Megatron-LM run that wrote it."""
    namespace = Instance(Name("argparse", "Namespace"), arguments)
    return object_archive(
        {"checkpoint_version": 3.0, "iteration": iteration, "content_metadata": CONTENT, "args": namespace}
    )


def _key_metadata(entry: StoredKey) -> Instance:
    if entry.dtype is None:
        return Instance(Name(_METADATA, "BytesStorageMetadata"), None)
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    encoding = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))  # contiguous
    properties = (Name("torch", _TORCH_TYPES[entry.dtype]), layout, False, encoding, False)
    chunks = [
        Instance(
            Name(_METADATA, "ChunkStorageMetadata"),
            {"offsets": _size(piece.offset), "sizes": _size(piece.size)},
        )
        for piece in entry.pieces
    ]
    state = {
        "properties": Instance(Name(_METADATA, "TensorProperties"), properties),
        "size": _size(entry.shape),
        "chunks": chunks,
    }
    return Instance(Name(_METADATA, "TensorStorageMetadata"), state)


def _size(values: tuple[int, ...] | None) -> Call | None:
    return None if values is None else Call(Name("torch", "Size"), (values,))
