"""One table: which Hugging Face tensors make up each megatron-core parameter, and how.

A megatron parameter is made of one or more HF tensors. ``join`` turns these into the *global* parameter
(as if TP were 1), ``split`` turns it back; both only move values, so a round trip is exact to the bit.
``shard`` cuts the global parameter for one TP rank and ``unshard`` is its inverse.

Layouts, from megatron-core: ``linear_qkv`` stacks, for each KV group, its query heads, its key head and
its value head; ``linear_fc1`` stacks the gate over the up projection, on each TP rank anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.policy.hf_config import ModelShape

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mapping:
    """How one megatron parameter is made of HF tensors."""

    hf_names: tuple[str, ...]
    """May contain ``{layer}``."""
    hf_shapes: Shapes
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    tp_dim: int | None
    """Dimension that tensor parallelism cuts; None for a replicated parameter."""
    tp_parts: int = 1
    """Stacked parts along ``tp_dim`` that are each cut on their own (gate and up: 2)."""

    def shard(self, value: Tensor, rank: int, size: int) -> Tensor:
        """The piece of the global parameter that TP rank ``rank`` of ``size`` holds."""
        if self.tp_dim is None or size == 1:
            return value
        parts = value.chunk(self.tp_parts, self.tp_dim)
        return torch.cat([part.chunk(size, self.tp_dim)[rank] for part in parts], self.tp_dim)

    def unshard(self, pieces: Sequence[Tensor]) -> Tensor:
        """The global parameter from the pieces of all TP ranks, in rank order."""
        if self.tp_dim is None or len(pieces) == 1:
            return pieces[0]
        dim = self.tp_dim
        parts = zip(*(piece.chunk(self.tp_parts, dim) for piece in pieces), strict=True)
        return torch.cat([torch.cat(part, dim) for part in parts], dim)


def mapping_table(shape: ModelShape) -> dict[str, Mapping]:
    """Megatron parameter names (``{layer}`` for the layer number) to their mappings."""
    h, d = shape.hidden, shape.head_dim
    queries = shape.heads * d
    hf = "model.layers.{layer}."
    mg = "decoder.layers.{layer}."
    table = {
        "embedding.word_embeddings.weight": _plain("model.embed_tokens.weight", (shape.vocab, h), tp_dim=0),
        mg + "input_layernorm.weight": _plain(hf + "input_layernorm.weight", (h,)),
        mg + "self_attention.linear_qkv.weight": _qkv(shape, "weight", (h,)),
        mg + "self_attention.linear_proj.weight": _plain(
            hf + "self_attn.o_proj.weight", (h, queries), tp_dim=1
        ),
        mg + "pre_mlp_layernorm.weight": _plain(hf + "post_attention_layernorm.weight", (h,)),
        mg + "mlp.linear_fc1.weight": _gate_up(shape),
        mg + "mlp.linear_fc2.weight": _plain(hf + "mlp.down_proj.weight", (h, shape.ffn), tp_dim=1),
        "decoder.final_layernorm.weight": _plain("model.norm.weight", (h,)),
    }
    if shape.qkv_bias:
        table[mg + "self_attention.linear_qkv.bias"] = _qkv(shape, "bias", ())
    if shape.qk_norm:
        table[mg + "self_attention.q_layernorm.weight"] = _plain(hf + "self_attn.q_norm.weight", (d,))
        table[mg + "self_attention.k_layernorm.weight"] = _plain(hf + "self_attn.k_norm.weight", (d,))
    if not shape.tied:
        table["output_layer.weight"] = _plain("lm_head.weight", (shape.vocab, h), tp_dim=0)
    return table


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor that an HF folder of this shape must hold, with its shape, in a natural order."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, mapping in mapping_table(shape).items():
        layers = range(shape.layers) if "{layer}" in name else range(1)
        for layer in layers:
            for hf_name, hf_shape in zip(mapping.hf_names, mapping.hf_shapes, strict=True):
                expected[hf_name.format(layer=layer)] = hf_shape
    return expected


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# Transformer Engine fuses a norm into the linear layer that follows it and names it there.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def canonical_name(name: str, first_layer: int) -> tuple[str, int | None]:
    """The table's name of a model chunk's parameter, and its layer number in the whole model.

    ``first_layer`` is the number of the chunk's first layer: pipeline stages count from 0 again.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name, None
    suffix = _FUSED_NORMS.get(match[2], match[2])
    return f"decoder.layers.{{layer}}.{suffix}", first_layer + int(match[1])


def _plain(hf_name: str, hf_shape: tuple[int, ...], tp_dim: int | None = None) -> Mapping:
    return Mapping((hf_name,), (hf_shape,), lambda tensors: tensors[0], lambda value: (value,), tp_dim)


def _qkv(shape: ModelShape, kind: str, tail: tuple[int, ...]) -> Mapping:
    groups, d = shape.kv_heads, shape.head_dim
    per_group = shape.heads // groups * d

    def join(tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = (tensor.reshape(groups, -1, *tail) for tensor in tensors)
        return torch.cat([q, k, v], 1).reshape(-1, *tail)

    def split(value: Tensor) -> tuple[Tensor, ...]:
        pieces = value.reshape(groups, per_group + 2 * d, *tail).split([per_group, d, d], 1)
        return tuple(piece.reshape(-1, *tail) for piece in pieces)

    names = tuple(f"model.layers.{{layer}}.self_attn.{x}_proj.{kind}" for x in "qkv")
    shapes = ((shape.heads * d, *tail), (groups * d, *tail), (groups * d, *tail))
    return Mapping(names, shapes, join, split, tp_dim=0)


def _gate_up(shape: ModelShape) -> Mapping:
    names = tuple(f"model.layers.{{layer}}.mlp.{x}_proj.weight" for x in ("gate", "up"))
    return Mapping(
        names,
        ((shape.ffn, shape.hidden),) * 2,
        join=lambda tensors: torch.cat(list(tensors), 0),
        split=lambda value: tuple(value.chunk(2, 0)),
        tp_dim=0,
        tp_parts=2,
    )
