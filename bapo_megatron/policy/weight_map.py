"""Weight map between Hugging Face tensors and megatron's parameters: loads shards, gathers the model.

``WeightMap.load`` fills this rank's parameters from an HF folder and reads only the rows and columns of its
shards (``shard_parts``). ``WeightMap.gather`` yields all tensors of the model under their HF names. All
conversions follow ``hf/parameter_map.py`` and only move values: a round trip is bit-exact, unless the load
casts (a folder of another dtype, or in fp8). The *global* parameter is the unsharded one, as at TP 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import canonical_name, mapping_table
from bapo_megatron.hf.reader import TensorReader
from bapo_megatron.layers import Mapping

Key = tuple[str, int | None]
"""Key of a parameter of the whole model: its name in the parameter map, and its layer."""


def stage_of(key: Key, chunk_layers: Sequence[int], stages: int) -> int:
    """Pipeline stage of a parameter, the first one if several stages have it.

    The model's layers form chunks of ``chunk_layers`` (``layout.chunk_layers``), assigned to the ``stages``
    in turn. The embedding is on the first stage, the final norm and the output layer on the last.
    """
    name, layer = key
    if layer is not None:
        return bisect_right(list(accumulate(chunk_layers)), layer) % stages
    return 0 if name.startswith("embedding.") else stages - 1


class WeightMap:
    """Map between the Hugging Face tensors of a model and this rank's megatron parameters. ``load`` fills the
    parameters from a folder and is local. ``gather`` yields unsharded tensors and is collective. The
    constructor raises KeyError for a parameter without a Hugging Face counterpart."""

    def __init__(self, shape: ModelShape, chunks: Sequence[Any], chunk_layers: Sequence[int]) -> None:
        """``chunks``: this rank's; ``chunk_layers``: layers of all chunks of the model."""
        self.table = mapping_table(shape)
        self._chunk_layers = chunk_layers
        self._experts_here = 1
        first_expert = 0
        if shape.experts:
            self._experts_here = shape.experts.count // parallel_state.get_expert_model_parallel_world_size()
            first_expert = self._experts_here * parallel_state.get_expert_model_parallel_rank()
        self.local: dict[Key, torch.nn.Parameter] = {}
        for chunk in chunks:
            first_layer = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
            for name, parameter in chunk.named_parameters():
                key = canonical_name(name, first_layer, first_expert)
                if shape.tied and key[0] == "output_layer.weight":
                    continue  # the last stage's copy of the tied embedding: use the first stage's
                if key[0] not in self.table:
                    raise KeyError(f"megatron parameter {name} has no Hugging Face counterpart")
                self.local[key] = parameter

    def keys(self) -> Iterator[Key]:
        """Yield the keys of the whole model's parameters, in the same order on all ranks."""
        for name, mapping in self.table.items():
            yield from ((name, layer) for layer in mapping.places)

    def load(self, reader: TensorReader, chunks: Sequence[Any], tied: bool) -> None:
        """Load this rank's shards from an HF folder, cast to the parameters' dtype; read nothing else."""
        for (name, layer), parameter in self.local.items():
            _fill(parameter, reader, self.table[name], layer)
        for chunk in chunks:
            if tied and chunk.post_process and not chunk.pre_process:  # the last stage's copy
                _fill(chunk.output_layer.weight, reader, self.table["embedding.word_embeddings.weight"], None)

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model as HF tensors, one parameter at a time, on every rank. Collective: with EP or ETP a
        replica may lack experts or parts of them, which come from others. A tensor is valid until the
        iterator moves on; clone it to keep it."""
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        for key in self.keys():
            name, layer = key
            mapping = self.table[name]
            owner = stage_of(key, self._chunk_layers, pipeline.size())
            value = self._on_stage(key, mapping) if pipeline.rank() == owner else self._empty(mapping)
            if pipeline.size() > 1:
                dist.broadcast(value, dist.get_global_rank(pipeline, owner), pipeline)
            for hf_name, tensor in zip(mapping.hf_names, split(mapping, value), strict=True):
                yield hf_name.format(layer=layer), tensor.contiguous()

    def _on_stage(self, key: Key, mapping: Mapping) -> Tensor:
        """Return the whole parameter on every rank of its pipeline stage."""
        if key in self.local:
            value = unshard(mapping, self._all_pieces(self.local[key].detach(), mapping)).contiguous()
        else:
            value = self._empty(mapping)
        experts = parallel_state.get_expert_model_parallel_group()
        if mapping.expert is not None and experts.size() > 1:
            source = mapping.expert // self._experts_here
            dist.broadcast(value, dist.get_global_rank(experts, source), experts)
        return value

    def _empty(self, mapping: Mapping) -> Tensor:
        like = next(value for key, value in self.local.items() if self.table[key[0]].dtype is None)
        dtype = getattr(torch, mapping.dtype) if mapping.dtype else like.dtype
        return torch.empty(mapping.shape, dtype=dtype, device=like.device)

    @staticmethod
    def _all_pieces(piece: Tensor, mapping: Mapping) -> list[Tensor]:
        group = cut_group(mapping)
        if mapping.tp_dim is None or group.size() == 1:
            return [piece]
        pieces = [torch.empty_like(piece) for _ in range(group.size())]
        dist.all_gather(pieces, piece.contiguous(), group)
        return pieces


def cut_group(mapping: Mapping) -> Any:
    """The process group that shards a parameter along its ``tp_dim``: TP, or ETP for an expert's."""
    if mapping.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()  # can span replicas


def _fill(parameter: Tensor, reader: TensorReader, mapping: Mapping, layer: int | None) -> None:
    group = cut_group(mapping)
    row = 0
    for source, rows, columns in shard_parts(mapping, group.rank(), group.size()):
        part = reader.read(mapping.hf_names[source].format(layer=layer), rows, columns)
        parameter.data[row : row + len(part)].copy_(part)
        row += len(part)


def split(mapping: Mapping, value: Tensor) -> tuple[Tensor, ...]:
    """Split the global parameter ``value`` into its HF tensors, views where rows are consecutive."""
    rows = value.split([segment.rows for segment in mapping.segments])
    pieces: list[list[Tensor]] = [[] for _ in mapping.hf_names]
    by_row = sorted(zip(mapping.segments, rows, strict=True), key=lambda pair: pair[0].row)
    for segment, piece in by_row:
        pieces[segment.source].append(piece)
    return tuple(_cat(parts, 0) for parts in pieces)


def shard(mapping: Mapping, value: Tensor, rank: int, size: int) -> Tensor:
    """Return TP rank ``rank``'s shard, of ``size`` ranks, of the global parameter."""
    if mapping.tp_dim is None or size == 1:
        return value
    parts = value.split(list(mapping.sections), mapping.tp_dim) if mapping.sections else [value]
    return _cat([part.chunk(size, mapping.tp_dim)[rank] for part in parts], mapping.tp_dim)


class Part(NamedTuple):
    """Part of an HF tensor in a rank's shard: the tensor's index, and slices of its rows and columns."""

    source: int
    """Index of the HF tensor among the parameter's."""
    rows: slice
    columns: slice = slice(None)


def shard_parts(mapping: Mapping, rank: int, size: int) -> Iterator[Part]:
    """Yield the parts of HF tensors that stack up to the shard of TP rank ``rank`` of ``size``."""
    if mapping.tp_dim == 1:
        width = mapping.shape[1] // size
        for segment in mapping.segments:
            rows = slice(segment.row, segment.row + segment.rows)
            yield Part(segment.source, rows, slice(rank * width, (rank + 1) * width))
        return
    ranks, own = (1, 0) if mapping.tp_dim is None else (size, rank)
    for first, length in mapping.spans:
        height = length // ranks
        for part in mapping.rows_of(first + own * height, first + (own + 1) * height):
            yield Part(part.source, slice(part.row, part.row + part.rows))


def unshard(mapping: Mapping, pieces: Sequence[Tensor]) -> Tensor:
    """Join the shards of all TP ranks, in rank order, into the global parameter."""
    if mapping.tp_dim is None or len(pieces) == 1:
        return pieces[0]
    dim = mapping.tp_dim
    own = [rows // len(pieces) for rows in mapping.sections]
    parts = zip(*(piece.split(own, dim) if own else [piece] for piece in pieces), strict=True)
    return torch.cat([piece for part in parts for piece in part], dim)  # one copy of the whole, not two


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
