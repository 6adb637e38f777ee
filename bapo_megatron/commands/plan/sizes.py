"""Parameter counts of each pipeline stage, from the HF-to-Megatron table that loads and converts weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from bapo_megatron.config import ParallelConfig
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.parameter_map import Mapping, mapping_table

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class StageParameters:
    """Number of parameters on one GPU of a pipeline stage."""

    layers: int
    body: int
    """Parameters of the stage's layers, and of the final norm on the last stage."""
    embedding: int
    output: int
    """Parameters of the output layer on the last stage: with tied embeddings a copy, or 0 if the stage has
    the embedding itself."""

    @property
    def total(self) -> int:
        """Parameters of the GPU."""
        return self.body + self.embedding + self.output


def stage_parameters(shape: ModelShape, parallel: ParallelConfig, stage: int) -> StageParameters:
    """Parameters on one GPU of pipeline stage ``stage``: TP splits the matrices, PP the layers, evenly."""
    per_layer, embedding, norm = _pieces(shape, parallel.tensor)
    layers = shape.layers // parallel.pipeline
    last = stage == parallel.pipeline - 1
    output = embedding if last and not (shape.tied and stage == 0) else 0
    return StageParameters(layers, layers * per_layer + norm * last, embedding * (stage == 0), output)


def total_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model, tied embeddings counted once."""
    return stage_parameters(shape, ParallelConfig(), 0).total


def largest_parameter(shape: ModelShape) -> int:
    """Number of entries of the largest parameter, unsharded: a weight sync gathers one at a time."""
    return max(_entries(mapping) for mapping in mapping_table(shape).values())


@lru_cache(maxsize=64)
def _pieces(shape: ModelShape, tensor: int) -> tuple[int, int, int]:
    """Parameters on one TP rank: of a layer, of the embedding, and of the final norm."""
    layer = embedding = norm = 0
    for name, mapping in mapping_table(shape).items():
        entries = _entries(mapping) // (1 if mapping.tp_dim is None else tensor)
        if "{layer}" in name:
            layer += entries
        elif name == _EMBEDDING:
            embedding = entries
        elif name != _OUTPUT:
            norm += entries
    return layer, embedding, norm


def _entries(mapping: Mapping) -> int:
    return sum(prod(shape) for shape in mapping.hf_shapes)
