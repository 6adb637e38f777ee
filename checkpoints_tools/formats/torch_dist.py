"""Reader of torch_dist, megatron-core's format: weights and optimizer state as Hugging Face tensors.

``TorchDist(folder, shape)`` returns them as blocks of files (``hf/blocks.py``), unread. Layers have one of
three layouts. *stacked*: one key for all, with the layer as first dimension. *per_layer*: one key each.
*singleton*: as per_layer, with separate keys for gate and up projection (``linear_fc1.weight_w`` and ``_v``).
Optimizer state has the model's keys with a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import ITEM_BYTES, WEIGHT_TYPES, Block, BlockTensor
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import checkpoint_keys, mapping_table
from bapo_megatron.layers import Mapping as Parameter
from bapo_megatron.layers import RowSegment
from checkpoints_tools.core.blocks import check_cover, cut_into_sources
from checkpoints_tools.formats.distcp import (
    ChunkFiles,
    Common,
    GlobalTensor,
    Metadata,
    TensorChunk,
    read_common,
    read_metadata,
)

OPTIMIZER_STATES = ("param", "exp_avg", "exp_avg_sq")
"""fp32 weights, and Adam's two moments."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters whose rows are tokens, perhaps padded beyond the vocabulary."""

OPTIMIZER = "optimizer.state."
"""Prefix of optimizer keys, before a state and a model key."""

RESHARDABLE = "fully_reshardable"

_PREFIXES = ("", "model.", "module.")
_EMBEDDING = VOCABULARY[0]
_OF_A_LAYER = re.compile(r"decoder\.layers\.\d+\..*?(\.weight_w)?")
_MASTERS = ("param", "fp32_param")


@dataclass(frozen=True, slots=True)
class _Part:
    """A checkpoint key that holds some rows of a parameter."""

    key: str
    place: tuple[int, ...]
    """Indices of its layer and expert, in the dimensions before the parameter's own."""
    segments: tuple[RowSegment, ...]


class TorchDist:
    """Reader of one torch_dist checkpoint: ``tensors`` has the weights, ``optimizer_tensors`` returns an Adam
    state, by Hugging Face name, as blocks of files. All methods raise CheckpointError if a tensor is missing,
    unknown, damaged or misshapen."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self.folder = folder
        self.shape = shape
        self.metadata: Metadata = read_metadata(folder)
        self.common: Common = read_common(folder, self.metadata)
        self.prefix = find_prefix(self.metadata, folder)
        self.layout = layers_layout(self.metadata, self.prefix)
        if self.layout == "stacked" and not shape.is_uniform:
            raise CheckpointError(
                f"{folder}: its layers are stacked under one key, but those of config.json are not all "
                "alike; is config.json that of this model?"
            )
        self._table = mapping_table(shape)
        self._check_keys()

    @cached_property
    def tensors(self) -> dict[str, BlockTensor]:
        """The model's weights by Hugging Face name."""
        return self._tensors(self.prefix)

    @property
    def optimizer_format(self) -> str | None:
        """Optimizer format (such as ``fully_reshardable``); None without an optimizer."""
        return optimizer_format(self.metadata, self.common.content)

    def optimizer_tensors(self, state: str) -> dict[str, BlockTensor]:
        """Return one of OPTIMIZER_STATES for every weight, in fp32, by Hugging Face name. Raises
        CheckpointError without an optimizer, or if its format has no whole tensors."""
        kind = self.optimizer_format
        if kind is None:
            raise CheckpointError(f"{self.folder} holds no optimizer state; it has only the weights")
        for name in _MASTERS if state == "param" else (state,):
            if f"{OPTIMIZER}{name}.{self.prefix}{_EMBEDDING}" in self.metadata.tensors:
                return self._tensors(f"{OPTIMIZER}{name}.{self.prefix}")
        raise CheckpointError(
            f"{self.folder}: the optimizer was saved as {kind}, which keeps no whole tensor of {state}. Load "
            f"it in the trainer at the layout it was saved with, and save it there as {RESHARDABLE}"
        )

    def _check_keys(self) -> None:
        """Raise CheckpointError if the checkpoint has a tensor unknown to the model family."""
        known = {part.key for _, parts in self._parts(self.prefix) for part in parts}
        ours = tuple(self.prefix + part for part in ("embedding.", "decoder.", "output_layer."))
        for key in self.metadata.tensors:
            if key.startswith(ours) and key not in known:
                tied = " and tied embeddings" if self.shape.tied else ""
                raise CheckpointError(
                    f"{self.folder}: tensor {key} belongs to no model of family {self.shape.family} with "
                    f"{self.shape.layers} layers{tied}; is config.json that of this model?"
                )

    def _tensors(self, prefix: str) -> dict[str, BlockTensor]:
        tensors: dict[str, BlockTensor] = {}
        with ChunkFiles() as files:
            chunks = _ChunksByPlace(files)
            for (name, layer), parts in self._parts(prefix):
                parameter = self._table[name]
                self._check_shapes(name, parameter, parts)
                cut: list[list[Block]] = [[] for _ in parameter.hf_names]
                for part in parts:
                    blocks = list(chunks.blocks(self.metadata.tensors[part.key], part.place))
                    for own, more in zip(cut, cut_into_sources(part.segments, len(cut), blocks), strict=True):
                        own.extend(more)
                dtype = self.metadata.tensors[parts[0].key].dtype
                for hf_name, shape, own in zip(parameter.hf_names, parameter.hf_shapes, cut, strict=True):
                    tensor = BlockTensor(hf_name.format(layer=layer), dtype, shape, tuple(own))
                    try:
                        check_cover(tensor)
                    except CheckpointError as error:
                        raise CheckpointError(f"{self.folder}: {error}") from None
                    tensors[tensor.name] = tensor
        return tensors

    def _parts(self, prefix: str) -> Iterator[tuple[tuple[str, int | None], list[_Part]]]:
        """Yield the keys of every parameter (name and layer)."""
        for name, parameter in self._table.items():
            for layer in parameter.places:
                yield (name, layer), self._parts_of(prefix, name, parameter, layer)

    def _parts_of(self, prefix: str, name: str, parameter: Parameter, layer: int | None) -> list[_Part]:
        stacked = self.layout == "stacked"
        if parameter.stored_apart or (parameter.section_keys and self.layout == "singleton"):
            key = prefix + name.format(layer=layer)
            return [
                _Part(key + own, (), tuple(parameter.rows_of(first, first + rows)))
                for own, (first, rows) in zip(parameter.section_keys, parameter.spans, strict=True)
            ]
        # Megatron's two layer specs use the same fused norm names; other writers may not.
        own = checkpoint_keys(name, self.shape.block_of(layer), stacked)
        keys = [prefix + key.format(layer=layer) for key in own]
        key = next((key for key in keys if key in self.metadata.tensors), keys[0])
        place = (layer,) if stacked and layer is not None else ()
        if parameter.expert is not None:
            place = (*place, parameter.expert)
        return [_Part(key, place, parameter.segments)]

    def _check_shapes(self, name: str, parameter: Parameter, parts: Sequence[_Part]) -> None:
        for part in parts:
            stored = self.metadata.tensors.get(part.key)
            if stored is None:
                raise CheckpointError(f"{self.folder}: tensor {part.key} is missing")
            if stored.dtype not in WEIGHT_TYPES:
                types = ", ".join(WEIGHT_TYPES)
                raise CheckpointError(
                    f"{self.folder}: {part.key} has type {stored.dtype}; only {types} can be read"
                )
            rows = sum(segment.rows for segment in part.segments)
            wanted = (*self._stacked(part, parameter), rows, *parameter.shape[1:])
            padded = name in VOCABULARY and stored.shape[:1] > wanted[:1] and stored.shape[1:] == wanted[1:]
            if stored.shape != wanted and not padded:
                raise CheckpointError(
                    f"{self.folder}: tensor {part.key} has shape {list(stored.shape)}, config.json asks for "
                    f"{list(wanted)}"
                )

    def _stacked(self, part: _Part, parameter: Parameter) -> tuple[int, ...]:
        """Return the dimensions before the parameter's own under its key: layers, experts."""
        experts = self.shape.experts
        counts = (experts.count,) if parameter.expert is not None and experts is not None else ()
        return (self.shape.layers, *counts) if len(part.place) > len(counts) else counts


def optimizer_format(metadata: Metadata, common: Mapping[str, Any]) -> str | None:
    """Return a checkpoint's optimizer format, in megatron-core's words; None without one."""
    if not any(key.startswith("optimizer.") for key in (*metadata.tensors, *metadata.objects)):
        return None
    content, state = common.get("content_metadata"), common.get("optimizer")
    for place, field in ((content, "distrib_optim_sharding_type"), (state, "param_state_sharding_type")):
        if isinstance(place, dict) and isinstance(place.get(field), str):
            return str(place[field])
    return "unknown"


def layers_layout(metadata: Metadata, prefix: str) -> str:
    """Return the layers' layout: ``stacked``, ``per_layer`` or ``singleton``."""
    own = (_OF_A_LAYER.fullmatch(key.removeprefix(prefix)) for key in metadata.tensors)
    layers = {match[1] for match in own if match}
    return "stacked" if not layers else "per_layer" if layers == {None} else "singleton"


def find_prefix(metadata: Metadata, folder: Path) -> str:
    """Return the prefix of the model's keys. Raises CheckpointError if there are no megatron-core keys."""
    for prefix in _PREFIXES:
        if prefix + _EMBEDDING in metadata.tensors:
            return prefix
    raise CheckpointError(
        f"{folder} holds no {_EMBEDDING}: it is not a checkpoint of a megatron-core GPT model"
    )


class _ChunksByPlace:
    """Index of stacked parameters' chunks by layer and expert; ``blocks`` yields those of one parameter as
    blocks. Sorts each key's chunks once: the experts of 30B-A3B have 12,288 chunks under two keys, and as
    many parameters look for theirs."""

    def __init__(self, files: ChunkFiles) -> None:
        self._files = files
        self._found: dict[tuple[int, int], dict[tuple[int, ...], list[TensorChunk]]] = {}

    def blocks(self, tensor: GlobalTensor, place: tuple[int, ...]) -> Iterator[Block]:
        """Yield the blocks of the parameter at ``place`` in the first dimensions of ``tensor``."""
        item, leading = ITEM_BYTES[tensor.dtype], len(place)
        for chunk in self._chunks(tensor, leading).get(place, ()):
            before = 0  # parameters that precede it in the chunk
            for index, offset, size in zip(place, chunk.offsets, chunk.sizes, strict=False):
                before = before * size + index - offset
            offsets, sizes = chunk.offsets[leading:], chunk.sizes[leading:]
            columns = prod(sizes[1:])
            column = offsets[1] * prod(sizes[2:]) if len(sizes) > 1 else 0
            stride = columns * item
            start = self._files.locate(tensor, chunk).position + before * sizes[0] * stride
            yield Block(offsets[0], sizes[0], column, columns, chunk.place.file, start, stride)

    def _chunks(self, tensor: GlobalTensor, leading: int) -> dict[tuple[int, ...], list[TensorChunk]]:
        key = id(tensor), leading
        if key not in self._found:
            by_place = self._found[key] = {}
            for chunk in tensor.chunks:
                spans = zip(chunk.offsets[:leading], chunk.sizes[:leading], strict=True)
                for place in product(*(range(first, first + count) for first, count in spans)):
                    by_place.setdefault(place, []).append(chunk)
        return self._found[key]
