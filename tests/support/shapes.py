"""Shapes of models whose layers are all alike, by the names of config.json's fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from bapo_megatron.config import ParallelConfig
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.layers import Block
from bapo_megatron.layers.attention import Attention
from bapo_megatron.layers.costs import Place, Recompute, Spec
from bapo_megatron.layers.mlp import Experts, Mlp
from bapo_megatron.planning.memory import block_bytes

_ATTENTION = {field.name for field in fields(Attention)}


def uniform(layers: int, ffn: int, experts: Experts | None = None, **sizes: Any) -> ModelShape:
    """A model of ``layers`` layers of attention, each with an MLP of width ``ffn``, or ``experts``."""
    attention = Attention(**{name: sizes.pop(name) for name in _ATTENTION & sizes.keys()})
    block = Block(attention, experts or Mlp(ffn))
    return ModelShape(ffn=ffn, blocks=(block,), pattern=(0,) * layers, **sizes)


def resized(shape: ModelShape, **sizes: Any) -> ModelShape:
    """``shape`` with other ``sizes``, which are named as those of ``uniform``."""
    own = {field.name: getattr(shape, field.name) for field in fields(shape)}
    del own["blocks"], own["pattern"]
    known = {**own, **vars(shape.attention), "layers": shape.layers, "experts": shape.experts}
    return uniform(**{**known, **sizes})


class LayerBytes(NamedTuple):
    """Bytes that a layer saves for a token, and those of its recomputation."""

    layer: float
    transient: float


def activation_bytes_per_token(
    shape: ModelShape,
    parallel: ParallelConfig,
    element: int,
    recompute: Recompute,
    spec: Spec,
    imbalance: float = 1.0,
) -> LayerBytes:
    """The activation memory of a layer of ``shape``, whose layers are all alike."""
    [block] = shape.blocks
    return LayerBytes(*block_bytes(block, Place(shape.hidden, parallel, element, spec, recompute, imbalance)))
