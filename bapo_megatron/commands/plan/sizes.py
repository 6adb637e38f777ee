"""Parameters of each pipeline stage, from the table that also loads and converts the weights."""

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
    """Parameters of its layers and of the final norm."""
    embedding: int
    output: int
    """Parameters of the output layer; the last stage's copy where embeddings are tied, 0 if it is the same
    tensor."""

    @property
    def total(self) -> int:
        """Parameters of all parts."""
        return self.body + self.embedding + self.output


def stage_parameters(shape: ModelShape, parallel: ParallelConfig, stage: int) -> StageParameters:
    """Parameters of a GPU of ``stage``: TP cuts the matrices, PP deals out the layers evenly."""
    per_layer, embedding, norm = _pieces(shape, parallel.tensor)
    layers = shape.layers // parallel.pipeline
    last = stage == parallel.pipeline - 1
    output = embedding if last and not (shape.tied and stage == 0) else 0
    return StageParameters(layers, layers * per_layer + norm * last, embedding * (stage == 0), output)


def total_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model, tied embeddings counted once."""
    return stage_parameters(shape, ParallelConfig(), 0).total


def largest_parameter(shape: ModelShape) -> int:
    """Entries of the largest single parameter, whole: what a weight sync gathers at a time."""
    return max(_entries(mapping) for mapping in mapping_table(shape).values())


@lru_cache(maxsize=64)
def _pieces(shape: ModelShape, tensor: int) -> tuple[int, int, int]:
    """One TP rank's entries of a layer, of the embedding, and of the final norm."""
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
