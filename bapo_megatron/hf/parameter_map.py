"""Parameter map: which Hugging Face tensors make up each megatron-core parameter, row by row.

A megatron parameter is its HF tensors cut into segments of rows and stacked. Weights in memory follow the
table (``shards.py``: loading, syncing), and so do weights in files (``checkpoints_tools``), which is why
nothing here needs torch. All shapes are *global*: those of a model that no parallelism has cut.

Layouts, from megatron-core: ``linear_qkv`` stacks, for each KV group, its query heads, its key head and
its value head; ``linear_fc1`` stacks the gate over the up projection, on each TP rank anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bapo_megatron.hf.config import ModelShape

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Row segment of a fused Megatron parameter (QKV, gate-up): consecutive rows of one HF tensor.

    Part of a ``Mapping``.
    """

    source: int
    """Index of the HF tensor among the parameter's."""
    row: int
    """First row of the segment in the HF tensor."""
    rows: int


@dataclass(frozen=True)
class Mapping:
    """Mapping of one megatron parameter: its HF tensors, row segments and tensor-parallel cut.

    Made by ``mapping_table``, one for each parameter of a layer or of the model.
    """

    hf_names: tuple[str, ...]
    """Names of the HF tensors, which may contain ``{layer}``."""
    hf_shapes: Shapes
    segments: tuple[RowSegment, ...]
    """Segments from the parameter's first row to its last. Each row of each HF tensor is in exactly one."""
    tp_dim: int | None
    """Dimension that tensor parallelism cuts; None for a replicated parameter."""
    tp_parts: int = 1
    """Stacked parts along ``tp_dim`` that are each cut on their own (gate and up: 2)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])


def mapping_table(shape: ModelShape) -> dict[str, Mapping]:
    """Parameter map of a model: from megatron names (``{layer}`` for the layer number) to mappings."""
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
    """All tensors of an HF folder of this model shape, with their shapes, in a natural order."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, mapping in mapping_table(shape).items():
        layers = range(shape.layers) if "{layer}" in name else range(1)
        for layer in layers:
            for hf_name, hf_shape in zip(mapping.hf_names, mapping.hf_shapes, strict=True):
                expected[hf_name.format(layer=layer)] = hf_shape
    return expected


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# Transformer Engine fuses a norm into the linear layer that follows it and names it there. Checkpoints do
# so too, whichever of the two wrote them.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_UNFUSED_NORMS = {plain: fused for fused, plain in _FUSED_NORMS.items()}


def canonical_name(name: str, first_layer: int) -> tuple[str, int | None]:
    """Name in the parameter map of a model chunk's parameter, and its layer number in the whole model.

    ``first_layer``: number of the chunk's first layer, because each pipeline stage counts from 0.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name, None
    suffix = _FUSED_NORMS.get(match[2], match[2])
    return f"decoder.layers.{{layer}}.{suffix}", first_layer + int(match[1])


def checkpoint_key(name: str, stacked: bool = True) -> str:
    """Key in a torch_dist checkpoint of the parameter ``name`` of the map.

    ``stacked``: all layers under one key, with a dimension for the layer in front of the parameter's own;
    otherwise a key for each, with ``{layer}`` in it as in the table's name.
    """
    prefix, layer, suffix = name.partition("decoder.layers.{layer}.")
    if not layer:
        return prefix
    return ("decoder.layers." if stacked else layer) + _UNFUSED_NORMS.get(suffix, suffix)


def _plain(hf_name: str, hf_shape: tuple[int, ...], tp_dim: int | None = None) -> Mapping:
    return Mapping((hf_name,), (hf_shape,), (RowSegment(0, 0, hf_shape[0]),), tp_dim)


def _qkv(shape: ModelShape, kind: str, tail: tuple[int, ...]) -> Mapping:
    groups, d = shape.kv_heads, shape.head_dim
    rows = (shape.heads // groups * d, d, d)  # of a group: query, key, value
    return Mapping(
        tuple(f"model.layers.{{layer}}.self_attn.{x}_proj.{kind}" for x in "qkv"),
        tuple((groups * count, *tail) for count in rows),
        tuple(RowSegment(i, g * count, count) for g in range(groups) for i, count in enumerate(rows)),
        tp_dim=0,
    )


def _gate_up(shape: ModelShape) -> Mapping:
    return Mapping(
        tuple(f"model.layers.{{layer}}.mlp.{x}_proj.weight" for x in ("gate", "up")),
        ((shape.ffn, shape.hidden),) * 2,
        (RowSegment(0, 0, shape.ffn), RowSegment(1, 0, shape.ffn)),
        tp_dim=0,
        tp_parts=2,
    )
