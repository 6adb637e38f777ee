"""Planner of torch_dist checkpoints, the format of megatron-core's ``dist_checkpointing``.

``plan_torch_dist`` returns the plan of the files, which ``conversion.convert`` writes. Parameters are global
tensors; layers of one kind are stacked under one key. Matrices split by TP are cut into a grid of chunks (an
expert's only above 1 GiB): a TP rank reads the chunks that meet its slice, so a grid of 8 lets every rank of
TP2, TP4 or TP8 read only its part. ``.metadata`` maps keys to the places of their chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from pathlib import Path

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import ITEM_BYTES, WEIGHT_TYPES, Block, BlockTensor
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import checkpoint_keys, mapping_table
from bapo_megatron.layers import Mapping as Parameter
from bapo_megatron.layers.mlp import EXPERTS
from checkpoints_tools.archives.torch_archive import (
    Call,
    Instance,
    Name,
    dumps,
    object_archive,
    tensor_archive,
)
from checkpoints_tools.core.atomic_output import PARTIAL, OutputPlan
from checkpoints_tools.core.blocks import cut_into_sources
from checkpoints_tools.formats.distcp import COMMON_FILE, METADATA_JSON
from checkpoints_tools.formats.torch_dist import VOCABULARY

DATA_FILES = 8  # each can be written by its own thread
MOST_CHUNK_BYTES = 1 << 30  # a rank reads a whole chunk for any part of it
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Archive planned in a data file, a chunk of a tensor or an object: offset, size, file, position."""

    offset: tuple[int, ...] | None
    """First element of the chunk in the tensor; None for an object."""
    size: tuple[int, ...]
    file: str
    position: int
    """Byte position of the archive in the file."""
    nbytes: int


@dataclass
class _StoredKey:
    """Key of the planned checkpoint: its tensor's dtype and shape (none for an object), its archives."""

    dtype: str | None
    """Type by safetensors' name; None for an object."""
    shape: tuple[int, ...] = ()
    pieces: list[_Piece] = field(default_factory=list)


@dataclass(frozen=True)
class Contents:
    """Contents of a new torch_dist checkpoint besides weights: common state, optimizer, objects, padding."""

    common: bytes
    """Archive of the common state."""
    states: tuple[str, ...] = ()
    """Prefixes of optimizer states, in the checkpoint's keys and in the names of ``tensors``."""
    objects: Mapping[str, bytes] = field(default_factory=dict)
    """Non-tensor archives by key."""
    vocabulary_rows: int | None = None
    """Rows of the padded vocabulary; None for no padding."""
    common_layout: str = COMMON_FILE
    """Location of the common state, a key of METADATA_JSON; every megatron-core reads ``common.pt``."""


def plan_torch_dist(
    tensors: Mapping[str, BlockTensor], shape: ModelShape, folder: Path, grid: int, contents: Contents
) -> OutputPlan:
    """Return the plan of a torch_dist checkpoint in ``folder`` for all of a model's ``tensors``. Raises
    CheckpointError if tensors that share a parameter differ in type."""
    return _TorchDistPlanner(tensors, shape, folder, grid, contents).plan()


class _TorchDistPlanner:
    """Planner of one checkpoint's files: ``plan`` returns the ``OutputPlan``. Puts each parameter of a layer
    into the data file that is shortest so far."""

    def __init__(
        self,
        tensors: Mapping[str, BlockTensor],
        shape: ModelShape,
        folder: Path,
        grid: int,
        contents: Contents,
    ) -> None:
        self.source, self.shape, self.folder, self.grid = tensors, shape, folder, grid
        self.contents = contents
        self.ends = [0] * DATA_FILES
        self.files: dict[tuple[tuple[str, ...], int | None], int] = {}
        self.stored: dict[str, _StoredKey] = {}
        self.blocks: dict[str, list[Block]] = {}
        self.output = OutputPlan()

    def plan(self) -> OutputPlan:
        for prefix in ("", *self.contents.states):
            for name, parameter in mapping_table(self.shape).items():
                self._place_all(prefix, name, self._padded(name, parameter))
        contents = self.contents
        apart, common = contents.common_layout == COMMON_FILE, {contents.common_layout: contents.common}
        self._place_objects({**self._extra_states(), **contents.objects, **({} if apart else common)})
        for name, blocks in self.blocks.items():
            known = self.source[name]
            self.output.tensors[name] = BlockTensor(name, known.weight_type, known.shape, tuple(blocks))
        self.output.sizes = {self._path(i): end for i, end in enumerate(self.ends) if end}
        backends = METADATA_JSON[contents.common_layout]
        files = {
            **(common if apart else {}),
            "metadata.json": json.dumps(backends).encode(),
            ".metadata": _metadata(self.stored),
        }
        self.output.last = {self.folder / name: data for name, data in files.items()}
        return self.output

    def _padded(self, name: str, parameter: Parameter) -> Parameter:
        """Return the parameter as stored: its segments cover the vocabulary's rows, not its padding."""
        rows = self.contents.vocabulary_rows
        if rows is None or name not in VOCABULARY:
            return parameter
        return replace(parameter, hf_shapes=((rows, *parameter.shape[1:]),))

    def _place_all(self, prefix: str, name: str, parameter: Parameter, ending: str = "") -> None:
        """Place a parameter of all layers, or each of its parts with its own key."""
        if parameter.stored_apart:
            for ending, part in parameter.parts():
                self._place_all(prefix, name, part, ending)
            return
        parameter = replace(parameter, hf_names=tuple(prefix + hf_name for hf_name in parameter.hf_names))
        stacked, experts = self.shape.is_uniform, self.shape.experts
        for layers in [parameter.places] if stacked else [(layer,) for layer in parameter.places]:
            names = [hf_name.format(layer=layer) for layer in layers for hf_name in parameter.hf_names]
            own, *_ = checkpoint_keys(name, self.shape.block_of(layers[0]), stacked)
            key = prefix + own.format(layer=layers[0]) + ending
            stack = () if parameter.layers is None or not stacked else (len(layers),)
            if experts is not None and parameter.expert is not None:
                stack = (*stack, experts.count)
            dtype = _shared_type(self.source, names)
            stored = self.stored.setdefault(key, _StoredKey(dtype, (*stack, *parameter.shape)))
            if stored.dtype != dtype:
                raise CheckpointError(
                    f"tensor {names[0]} is {dtype}, those of other experts are {stored.dtype}; "
                    "megatron-core keeps them under one key, which has one type"
                )
            for layer in layers:
                self._place(key, dtype, parameter, layer)

    def _place(self, key: str, dtype: str, parameter: Parameter, layer: int | None) -> None:
        """Place one parameter of one layer in one file: two threads must not write the same file."""
        # Keyed by names that the parts of a parameter share.
        file = self.files.setdefault((parameter.hf_names, layer), self.ends.index(min(self.ends)))
        # Ranks read whole experts (EP), seldom parts (ETP): one chunk each.
        grid = self.grid if parameter.expert is None else 1
        stack = layer if self.shape.is_uniform else None
        place = tuple(index for index in (stack, parameter.expert) if index is not None)
        for row, rows, column, columns in _chunks(parameter, ITEM_BYTES[dtype], grid):
            tail = parameter.shape[1:]
            size = (rows, columns) if parameter.tp_dim == 1 else (rows, *tail)
            offset = (row, column) if parameter.tp_dim == 1 else (row, *(0 for _ in tail))
            size, offset = (*(1,) * len(place), *size), (*place, *offset)
            archive = tensor_archive(dtype, size, self.ends[file])
            begin = self._append(key, offset, size, file, archive.nbytes)
            payload = begin + len(archive.before)
            path, row_bytes = self._path(file), columns * ITEM_BYTES[dtype]
            self.output.around[path] += [
                (begin, archive.before),
                (payload + archive.payload, archive.after),
            ]
            stored = Block(row, rows, column, columns, path, payload, row_bytes)
            parts = cut_into_sources(parameter.segments, len(parameter.hf_names), [stored])
            for name, blocks in zip(parameter.hf_names, parts, strict=True):
                self.blocks.setdefault(name.format(layer=layer), []).extend(blocks)

    def _extra_states(self) -> dict[str, bytes]:
        """Return the states of Transformer Engine's modules, which are empty without FP8. megatron-core
        requests those of the loading model's modules, and rejects a checkpoint without them."""
        shape, keys = self.shape, ["decoder.final_layernorm._extra_state/shard_0_1"]
        for layer, block in enumerate(shape.pattern):
            # A key's shard: its place and the sizes in the dimensions of layers and experts.
            own, at, of = ("", [layer], [shape.layers]) if shape.is_uniform else (f"{layer}.", [], [])
            for module in (module for kind in shape.blocks[block].kinds for module in kind.states()):
                count = shape.experts.count if shape.experts and module.startswith(EXPERTS) else 0
                for place in [[*at, expert] for expert in range(count)] or [at or [0]]:
                    size = [*of, count] if count else of or [1]
                    shard = "_".join(".".join(map(str, numbers)) for numbers in (place, size))
                    keys.append(f"decoder.layers.{own}{module}._extra_state/shard_{shard}")
        return dict.fromkeys(keys, object_archive([None]))

    def _place_objects(self, objects: Mapping[str, bytes]) -> None:
        for key, archive in objects.items():
            self.stored[key] = _StoredKey(None)
            position = self._append(key, None, (), 0, len(archive))
            self.output.around[self._path(0)].append((position, archive))

    def _append(
        self, key: str, offset: tuple[int, ...] | None, size: tuple[int, ...], file: int, nbytes: int
    ) -> int:
        position = self.ends[file]
        self.ends[file] += nbytes
        piece = _Piece(offset, size, f"__0_{file}.distcp", position, nbytes)
        self.stored[key].pieces.append(piece)
        return position

    def _path(self, file: int) -> Path:
        return self.folder / f"__0_{file}.distcp{PARTIAL}"


def _chunks(parameter: Parameter, item: int, grid: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield a parameter's chunks, ``item`` bytes per element: first row, rows, first column, columns. Vectors
    are stored whole: a piece costs a reader more than a vector's bytes."""
    rows, columns = parameter.shape[0], prod(parameter.shape[1:])
    if parameter.tp_dim is None or len(parameter.shape) == 1:
        yield 0, rows, 0, columns
    elif parameter.tp_dim == 0:
        for first, part in parameter.spans:
            count = min(part, max(grid, ceil(part * columns * item / MOST_CHUNK_BYTES)))
            for begin, end in _cuts(part, count):
                yield first + begin, end - begin, 0, columns
    else:
        count = min(columns, max(grid, ceil(rows * columns * item / MOST_CHUNK_BYTES)))
        for begin, end in _cuts(columns, count):
            yield 0, rows, begin, end - begin


def _cuts(length: int, count: int) -> Iterator[tuple[int, int]]:
    return ((length * i // count, length * (i + 1) // count) for i in range(count))


def _metadata(stored: Mapping[str, _StoredKey]) -> bytes:
    places = {}
    for key, entry in stored.items():
        for piece in entry.pieces:
            index = {"fqn": key, "index": None, "offset": _size(piece.offset)}
            place = {"relative_path": piece.file, "offset": piece.position, "length": piece.nbytes}
            instance = Instance(Name(_METADATA, "MetadataIndex"), index)
            places[instance] = Instance(Name(_FILESYSTEM, "_StorageInfo"), place)
    state = {
        "state_dict_metadata": {key: _key_metadata(entry) for key, entry in stored.items()},
        "planner_data": None,
        "storage_data": places,
        "storage_meta": None,
    }
    return dumps(Instance(Name(_METADATA, "Metadata"), state))


def _key_metadata(entry: _StoredKey) -> Instance:
    if entry.dtype is None:
        return Instance(Name(_METADATA, "BytesStorageMetadata"), None)
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    encoding = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))  # contiguous
    properties = (Name("torch", WEIGHT_TYPES[entry.dtype]), layout, False, encoding, False)
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


def _shared_type(tensors: Mapping[str, BlockTensor], names: Sequence[str]) -> str:
    """Return the common type of tensors that share a parameter. Raises CheckpointError if they differ."""
    first = names[0]
    for name in names:
        if tensors[name].weight_type != tensors[first].weight_type:
            raise CheckpointError(
                f"tensor {name} is {tensors[name].weight_type} and {first} is {tensors[first].weight_type}; "
                "megatron-core keeps them in one parameter, which has one type"
            )
    return tensors[first].weight_type
