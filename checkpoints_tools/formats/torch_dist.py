"""Reader of torch_dist, megatron-core's format: weights and optimizer state as Hugging Face tensors.

Three layouts of the layers occur. *stacked*: one key for all, with the layer as the first dimension.
*per_layer*: a key for each. *singleton*: as per_layer, and gate and up projection under keys of their own
(``linear_fc1.weight_w`` and ``_v``). Optimizer state has the model's keys behind a prefix. The tensors are
given as places in files (``core/blocks.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import Mapping as Parameter
from bapo_megatron.hf.parameter_map import RowSegment, checkpoint_key, mapping_table
from checkpoints_tools.core.blocks import ITEM_BYTES, Block, BlockTensor
from checkpoints_tools.core.segments import check_cover, cut_into_sources
from checkpoints_tools.formats.distcp import ChunkFiles, GlobalTensor, Metadata, read_common, read_metadata

OPTIMIZER_STATES = ("param", "exp_avg", "exp_avg_sq")
"""The fp32 weights, and the two moments of Adam."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters whose rows are tokens, and may be more than the vocabulary's."""

OPTIMIZER = "optimizer.state."
"""Prefix of the optimizer's keys, before a state and a key of the model."""

RESHARDABLE = "fully_reshardable"

_PREFIXES = ("", "model.", "module.")
_EMBEDDING, _FC1 = VOCABULARY[0], "decoder.layers.{layer}.mlp.linear_fc1.weight"
_MASTERS = ("param", "fp32_param")


@dataclass(frozen=True, slots=True)
class _Part:
    """Key that holds some rows of a parameter; of one layer, if layers are stacked."""

    key: str
    layer: int | None
    segments: tuple[RowSegment, ...]


class TorchDist:
    """A torch_dist checkpoint as a model: ``tensors``, and ``optimizer_tensors`` if it holds them whole.

    CheckpointError, from any method, if a tensor is missing, unknown, damaged or misshapen. Made by
    ``open_checkpoint``.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self.folder = folder
        self.shape = shape
        self.metadata: Metadata = read_metadata(folder)
        self.common: dict[str, Any] = read_common(folder)
        self.prefix = find_prefix(self.metadata, folder)
        self.layout = layers_layout(self.metadata, self.prefix)
        self._table = mapping_table(shape)
        self._check_keys()

    @cached_property
    def tensors(self) -> dict[str, BlockTensor]:
        """The model's weights by Hugging Face name."""
        return self._tensors(self.prefix)

    @property
    def optimizer_format(self) -> str | None:
        """How the optimizer was saved (``fully_reshardable`` and others); None without an optimizer."""
        return optimizer_format(self.metadata, self.common)

    def optimizer_tensors(self, state: str) -> dict[str, BlockTensor]:
        """One of OPTIMIZER_STATES for every weight, in fp32, by Hugging Face name.

        CheckpointError without an optimizer, or if it was saved in a format that holds no whole tensors.
        """
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

    def vocabulary_rows(self) -> int:
        """Rows of the embedding as stored, with those that only pad it."""
        return self.metadata.tensors[self.prefix + _EMBEDDING].shape[0]

    def _check_keys(self) -> None:
        """Check that the model family has every tensor of the checkpoint; CheckpointError if not."""
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
        found: dict[str, BlockTensor] = {}
        with ChunkFiles() as files:
            for (name, layer), parts in self._parts(prefix):
                parameter = self._table[name]
                self._check_shapes(name, parameter, parts)
                cut: list[list[Block]] = [[] for _ in parameter.hf_names]
                for part in parts:
                    blocks = list(_blocks(files, self.metadata.tensors[part.key], part.layer))
                    for held, more in zip(
                        cut, cut_into_sources(part.segments, len(cut), blocks), strict=True
                    ):
                        held.extend(more)
                dtype = self.metadata.tensors[parts[0].key].dtype
                for hf_name, shape, held in zip(parameter.hf_names, parameter.hf_shapes, cut, strict=True):
                    tensor = BlockTensor(hf_name.format(layer=layer), dtype, shape, tuple(held))
                    self._check(tensor)
                    found[tensor.name] = tensor
        return found

    def _check(self, tensor: BlockTensor) -> None:
        try:
            check_cover(tensor)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error}") from None

    def _parts(self, prefix: str) -> Iterator[tuple[tuple[str, int], list[_Part]]]:
        """For every parameter (name and layer) the keys that hold it."""
        for name, parameter in self._table.items():
            for layer in range(self.shape.layers) if "{layer}" in name else range(1):
                yield (name, layer), self._parts_of(prefix, name, parameter, layer)

    def _parts_of(self, prefix: str, name: str, parameter: Parameter, layer: int) -> list[_Part]:
        stacked = self.layout == "stacked"
        if name == _FC1 and self.layout == "singleton":
            key = prefix + name.format(layer=layer)
            return [
                _Part(f"{key}_{half}", None, (RowSegment(source, 0, self.shape.ffn),))
                for source, half in enumerate("wv")
            ]
        # Megatron's two layer specs agree on the fused names of the norms; other writers may not.
        plain = name.replace("{layer}.", "" if stacked else "{layer}.")
        keys = [prefix + key.format(layer=layer) for key in (checkpoint_key(name, stacked), plain)]
        key = next((key for key in keys if key in self.metadata.tensors), keys[0])
        return [_Part(key, layer if stacked and "{layer}" in name else None, parameter.segments)]

    def _check_shapes(self, name: str, parameter: Parameter, parts: Sequence[_Part]) -> None:
        for part in parts:
            held = self.metadata.tensors.get(part.key)
            if held is None:
                raise CheckpointError(f"{self.folder}: tensor {part.key} is missing")
            if held.dtype not in ITEM_BYTES:
                types = ", ".join(ITEM_BYTES)
                raise CheckpointError(
                    f"{self.folder}: {part.key} has type {held.dtype}; only {types} can be read"
                )
            rows = sum(segment.rows for segment in part.segments)
            leading = () if part.layer is None else (self.shape.layers,)
            wanted = (*leading, rows, *parameter.shape[1:])
            padded = name in VOCABULARY and held.shape[:1] > wanted[:1] and held.shape[1:] == wanted[1:]
            if held.shape != wanted and not padded:
                raise CheckpointError(
                    f"{self.folder}: tensor {part.key} has shape {list(held.shape)}, config.json asks for "
                    f"{list(wanted)}"
                )


def optimizer_format(metadata: Metadata, common: Mapping[str, Any]) -> str | None:
    """How the optimizer of a checkpoint was saved, in megatron-core's words; None without one."""
    if not any(key.startswith("optimizer.") for key in (*metadata.tensors, *metadata.objects)):
        return None
    content, state = common.get("content_metadata"), common.get("optimizer")
    for place, field in ((content, "distrib_optim_sharding_type"), (state, "param_state_sharding_type")):
        if isinstance(place, dict) and isinstance(place.get(field), str):
            return str(place[field])
    return "unknown"


def layers_layout(metadata: Metadata, prefix: str) -> str:
    """The layout of the layers: ``stacked``, ``per_layer`` or ``singleton``."""
    if prefix + _FC1.format(layer=0) + "_w" in metadata.tensors:
        return "singleton"
    return "per_layer" if prefix + _FC1.format(layer=0) in metadata.tensors else "stacked"


def find_prefix(metadata: Metadata, folder: Path) -> str:
    """The prefix of the model's keys. CheckpointError if there is none of megatron-core."""
    for prefix in _PREFIXES:
        if prefix + _EMBEDDING in metadata.tensors:
            return prefix
    raise CheckpointError(f"{folder} holds no {_EMBEDDING}: it is no checkpoint of a megatron-core GPT model")


def _blocks(files: ChunkFiles, tensor: GlobalTensor, layer: int | None) -> Iterator[Block]:
    """The chunks of a tensor (for one layer, where layers are stacked) as blocks of the parameter."""
    item = ITEM_BYTES[tensor.dtype]
    for chunk in tensor.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        if layer is not None and not offsets[0] <= layer < offsets[0] + sizes[0]:
            continue
        position = files.locate(tensor, chunk).position
        before = 0 if layer is None else layer - offsets[0]
        if layer is not None:
            offsets, sizes = offsets[1:], sizes[1:]
        columns = sizes[1] if len(sizes) > 1 else 1
        column = offsets[1] if len(sizes) > 1 else 0
        stride = columns * item
        start = position + before * sizes[0] * stride
        yield Block(offsets[0], sizes[0], column, columns, chunk.place.file, start, stride)
