"""Writer of torch_dist, the format of megatron-core's ``dist_checkpointing``: output plan of its files.

It plans; ``conversion.py`` writes. The parameters are global tensors, those of all layers stacked under one
key. Matrices that TP splits are cut into a grid of chunks (an expert's only above 1 GiB): a TP rank reads
those that meet its slice, so a grid of 8 spares every rank of TP2, TP4 or TP8 the rest. Used by
``checkpoints_tools/resharding.py`` and ``checkpoints_tools/to_megatron.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, prod
from pathlib import Path

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import Mapping as Parameter
from bapo_megatron.hf.parameter_map import checkpoint_key, mapping_table
from checkpoints_tools.archives.torch_archive import object_archive, tensor_archive
from checkpoints_tools.archives.torch_dist_metadata import METADATA_JSON, Piece, StoredKey, metadata
from checkpoints_tools.core.blocks import ITEM_BYTES, Block, BlockTensor
from checkpoints_tools.core.output_plan import PARTIAL, OutputPlan
from checkpoints_tools.core.segments import cut_into_sources, shared_type
from checkpoints_tools.formats.torch_dist import VOCABULARY

DATA_FILES = 8  # each may be written by a thread of its own
MOST_CHUNK_BYTES = 1 << 30  # a rank that needs a part of a chunk reads all of it
# Modules of Transformer Engine keep a state of their own, which is nothing without FP8. megatron-core asks
# for that of the modules that the loading model has, and refuses a checkpoint without it.
_LAYER_MODULES = (
    "self_attention.core_attention",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
)
_MLP, _BEFORE_EXPERTS = ("mlp.linear_fc1", "mlp.linear_fc2"), ("pre_mlp_layernorm",)
_QK_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of a parameter, rows and columns, that is stored as one chunk.

    The writer cuts each parameter into them.
    """

    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint beside the weights: common state, optimizer keys, objects, padding.

    Made by ``to_megatron`` and ``reshard``.
    """

    common: bytes
    """The bytes of ``common.pt``."""
    states: tuple[str, ...] = ()
    """Prefixes under which the optimizer keeps tensors of the model's keys, and ``tensors`` those of its
    names."""
    objects: Mapping[str, bytes] = field(default_factory=dict)
    """Archives that are no tensors, by key."""
    vocabulary_rows: int | None = None
    """Rows to which the vocabulary is padded; None for no padding."""


def plan_torch_dist(
    tensors: Mapping[str, BlockTensor], shape: ModelShape, folder: Path, grid: int, contents: Contents
) -> OutputPlan:
    """The files of a torch_dist checkpoint in ``folder`` for all of a model's ``tensors``.

    CheckpointError if tensors that share a parameter differ in type.
    """
    return _TorchDistPlanner(tensors, shape, folder, grid, contents).plan()


class _TorchDistPlanner:
    """Planner of one checkpoint's files: puts each parameter into the shortest data file so far."""

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
        self.stored: dict[str, StoredKey] = {}
        self.blocks: dict[str, list[Block]] = {}
        self.output = OutputPlan()

    def plan(self) -> OutputPlan:
        for prefix in ("", *self.contents.states):
            for name, parameter in mapping_table(self.shape).items():
                self._place_all(prefix, name, self._padded(name, parameter))
        self._place_objects({**self._extra_states(), **self.contents.objects})
        for name, blocks in self.blocks.items():
            known = self.source[name]
            self.output.tensors[name] = BlockTensor(name, known.weight_type, known.shape, tuple(blocks))
        self.output.sizes = {self._path(i): end for i, end in enumerate(self.ends) if end}
        self.output.last = {
            self.folder / "common.pt": self.contents.common,
            self.folder / "metadata.json": json.dumps(METADATA_JSON).encode(),
            self.folder / ".metadata": metadata(self.stored),
        }
        return self.output

    def _padded(self, name: str, parameter: Parameter) -> Parameter:
        """The parameter as it is stored: its segments cover the rows of the vocabulary, not its padding."""
        rows = self.contents.vocabulary_rows
        if rows is None or name not in VOCABULARY:
            return parameter
        return replace(parameter, hf_shapes=((rows, *parameter.shape[1:]),))

    def _place_all(self, prefix: str, name: str, parameter: Parameter) -> None:
        """A parameter of all layers."""
        layers = range(self.shape.layers) if "{layer}" in name else [None]
        parameter = replace(parameter, hf_names=tuple(prefix + hf_name for hf_name in parameter.hf_names))
        names = [hf_name.format(layer=layer) for layer in layers for hf_name in parameter.hf_names]
        experts = self.shape.experts
        key = prefix + checkpoint_key(name, sparse=experts is not None)
        stack = (self.shape.layers,) if "{layer}" in name else ()
        if experts is not None and parameter.expert is not None:
            stack = (*stack, experts.count)
        dtype = shared_type(self.source, names)
        stored = self.stored.setdefault(key, StoredKey(dtype, (*stack, *parameter.shape)))
        if stored.dtype != dtype:
            raise CheckpointError(
                f"tensor {names[0]} is {dtype}, those of other experts are {stored.dtype}; "
                "megatron-core keeps them under one key, which has one type"
            )
        for layer in layers:
            self._place(key, dtype, parameter, layer)

    def _place(self, key: str, dtype: str, parameter: Parameter, layer: int | None) -> None:
        """One parameter of one layer, in one file: two threads must not write the same file."""
        file = self.ends.index(min(self.ends))
        vector = len(parameter.shape) == 1
        # Ranks read whole experts (EP), and seldom a part of one (ETP): a chunk each.
        grid = self.grid if parameter.expert is None else 1
        place = tuple(index for index in (layer, parameter.expert) if index is not None)
        for chunk in chunks(parameter, ITEM_BYTES[dtype], grid):
            size = (chunk.rows,) if vector else (chunk.rows, chunk.columns)
            offset = (chunk.row,) if vector else (chunk.row, chunk.column)
            size, offset = (*(1,) * len(place), *size), (*place, *offset)
            archive = tensor_archive(dtype, size, self.ends[file])
            begin = self._append(key, offset, size, file, archive.nbytes)
            payload = begin + len(archive.before)
            self.output.around.append((self._path(file), begin, archive.before))
            self.output.around.append((self._path(file), payload + archive.payload, archive.after))
            row_bytes = chunk.columns * ITEM_BYTES[dtype]
            stored = Block(
                chunk.row, chunk.rows, chunk.column, chunk.columns, self._path(file), payload, row_bytes
            )
            parts = cut_into_sources(parameter.segments, len(parameter.hf_names), [stored])
            for name, blocks in zip(parameter.hf_names, parts, strict=True):
                self.blocks.setdefault(name.format(layer=layer), []).extend(blocks)

    def _extra_states(self) -> dict[str, bytes]:
        empty = object_archive([None])
        count = self.shape.layers
        modules = _LAYER_MODULES + (_QK_NORMS if self.shape.qk_norm else ())
        modules += _MLP if self.shape.experts is None else _BEFORE_EXPERTS
        keys = [f"decoder.layers.{m}._extra_state/shard_{i}_{count}" for i in range(count) for m in modules]
        experts = self.shape.experts.count if self.shape.experts else 0
        keys += [
            f"decoder.layers.mlp.experts.experts.{m}._extra_state/shard_{i}.{e}_{count}.{experts}"
            for i in range(count)
            for e in range(experts)
            for m in ("linear_fc1", "linear_fc2")
        ]
        return dict.fromkeys([*keys, "decoder.final_layernorm._extra_state/shard_0_1"], empty)

    def _place_objects(self, objects: Mapping[str, bytes]) -> None:
        for key, archive in objects.items():
            self.stored[key] = StoredKey(None)
            position = self._append(key, None, (), 0, len(archive))
            self.output.around.append((self._path(0), position, archive))

    def _append(
        self, key: str, offset: tuple[int, ...] | None, size: tuple[int, ...], file: int, nbytes: int
    ) -> int:
        """Give the archive of a piece its place at the end of a file."""
        position = self.ends[file]
        self.ends[file] += nbytes
        piece = Piece(offset, size, f"__0_{file}.distcp", position, nbytes)
        self.stored[key].pieces.append(piece)
        return position

    def _path(self, file: int) -> Path:
        return self.folder / f"__0_{file}.distcp{PARTIAL}"


def chunks(parameter: Parameter, item: int, grid: int) -> Iterator[Rectangle]:
    """The chunks of a parameter, each stored on its own; ``item`` bytes an element.

    Vectors are stored whole: a piece costs a reader more than a vector's bytes.
    """
    rows, columns = parameter.shape[0], prod(parameter.shape[1:])
    if parameter.tp_dim is None or len(parameter.shape) == 1:
        yield Rectangle(0, rows, 0, columns)
    elif parameter.tp_dim == 0:
        part = rows // parameter.tp_parts
        count = min(part, max(grid, ceil(part * columns * item / MOST_CHUNK_BYTES)))
        for first in range(0, rows, part):
            for begin, end in _cuts(part, count):
                yield Rectangle(first + begin, end - begin, 0, columns)
    else:
        count = min(columns, max(grid, ceil(rows * columns * item / MOST_CHUNK_BYTES)))
        for begin, end in _cuts(columns, count):
            yield Rectangle(0, rows, begin, end - begin)


def _cuts(length: int, count: int) -> Iterator[tuple[int, int]]:
    return ((length * i // count, length * (i + 1) // count) for i in range(count))
