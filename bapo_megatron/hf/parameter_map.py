"""Parameter map: which Hugging Face tensors make up each megatron-core parameter, row by row.

A megatron parameter is its HF tensors cut into segments of rows and stacked. Weights in memory follow the
table (``policy/weight_map.py``: loading, syncing), and so do weights in files (``checkpoints_tools``), which
is why nothing here needs torch. All shapes are *global*: those of a model that no parallelism has cut.

Layouts, from megatron-core: ``linear_qkv`` stacks, for each KV group, its query heads, its key head and its
value head; ``linear_fc1`` stacks the gate over the up projection, on each TP rank anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapo_megatron.hf.config import ExpertShape, ModelShape

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by their Hugging Face names."""


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Row segment of a fused Megatron parameter (QKV, gate-up): consecutive rows of one HF tensor."""

    source: int
    """Index of the HF tensor among the parameter's."""
    row: int
    """First row of the segment in the HF tensor."""
    rows: int


@dataclass(frozen=True)
class Mapping:
    """Mapping of one megatron parameter of a layer or the model: HF tensors, row segments, TP cut."""

    hf_names: tuple[str, ...]
    """Names of the HF tensors, which may contain ``{layer}``."""
    hf_shapes: tuple[tuple[int, ...], ...]
    segments: tuple[RowSegment, ...]
    """Segments from the parameter's first row to its last. Each row of each HF tensor is in exactly one."""
    tp_dim: int | None
    """Dimension that tensor parallelism cuts; None for a replicated parameter."""
    tp_parts: int = 1
    """Stacked parts along ``tp_dim`` that are each cut on their own (gate and up: 2)."""
    expert: int | None = None
    """Number of the parameter's expert, which one rank of EP has, and ETP cuts along ``tp_dim``. None: every
    rank of EP has the parameter, and TP cuts it."""

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
        "embedding.word_embeddings.weight": _plain(EMBEDDING, (shape.vocab, h), tp_dim=0),
        mg + "input_layernorm.weight": _plain(hf + "input_layernorm.weight", (h,)),
        mg + "self_attention.linear_qkv.weight": _qkv(shape, "weight", (h,)),
        mg + "self_attention.linear_proj.weight": _plain(
            hf + "self_attn.o_proj.weight", (h, queries), tp_dim=1
        ),
        mg + "pre_mlp_layernorm.weight": _plain(hf + "post_attention_layernorm.weight", (h,)),
        **(
            _mixture(mg + "mlp.", hf + "mlp.", shape.experts, h)
            if shape.experts
            else _mlp(mg + "mlp.", hf + "mlp.", shape.ffn, h)
        ),
        "decoder.final_layernorm.weight": _plain("model.norm.weight", (h,)),
    }
    if shape.qkv_bias:
        table[mg + "self_attention.linear_qkv.bias"] = _qkv(shape, "bias", ())
    if shape.qk_norm:
        table[mg + "self_attention.q_layernorm.weight"] = _plain(hf + "self_attn.q_norm.weight", (d,))
        table[mg + "self_attention.k_layernorm.weight"] = _plain(hf + "self_attn.k_norm.weight", (d,))
    if not shape.tied:
        table["output_layer.weight"] = _plain(OUTPUT, (shape.vocab, h), tp_dim=0)
    return table


def _mlp(mg: str, hf: str, ffn: int, hidden: int) -> dict[str, Mapping]:
    """A gated MLP of width ``ffn``: that of a dense layer, or one expert."""
    return {
        mg + "linear_fc1.weight": Mapping(
            tuple(f"{hf}{x}_proj.weight" for x in ("gate", "up")),
            ((ffn, hidden),) * 2,
            (RowSegment(0, 0, ffn), RowSegment(1, 0, ffn)),
            tp_dim=0,
            tp_parts=2,
        ),
        mg + "linear_fc2.weight": _plain(hf + "down_proj.weight", (hidden, ffn), tp_dim=1),
    }


def _mixture(mg: str, hf: str, experts: ExpertShape, hidden: int) -> dict[str, Mapping]:
    """A mixture of experts: the router, which every rank has, and each expert's MLP."""
    table = {mg + "router.weight": _plain(hf + "gate.weight", (experts.count, hidden))}
    for number in range(experts.count):
        own = f"experts.{number}."
        for name, mapping in _mlp(mg + own, hf + own, experts.ffn, hidden).items():
            table[name] = replace(mapping, expert=number)
    return table


def hf_tensors(shape: ModelShape) -> Shapes:
    """All tensors of an HF folder of this model shape, with their shapes, in a natural order."""
    expected: Shapes = {}
    for name, mapping in mapping_table(shape).items():
        for layer in range(shape.layers) if "{layer}" in name else range(1):
            for hf_name, hf_shape in zip(mapping.hf_names, mapping.hf_shapes, strict=True):
                expected[hf_name.format(layer=layer)] = hf_shape
    return expected


def tensor_problems(found: Shapes, shape: ModelShape) -> list[str]:
    """Problems of a folder's tensors, ``found`` with their shapes: missing, unknown or misshapen.

    Tied models are often stored with a copy of the embedding under the name of the output layer.
    """
    expected = hf_tensors(shape)
    known = {*expected, OUTPUT} if shape.tied else {*expected}
    return [
        *(f"tensor {name} is missing" for name in expected if name not in found),
        *(f"tensor {name} is not of this model family" for name in found if name not in known),
        *(
            f"tensor {name} has shape {list(found[name])}, config.json asks for {list(wanted)}"
            for name, wanted in expected.items()
            if name in found and found[name] != wanted
        ),
    ]


_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj")


def is_fused_experts(name: str) -> bool:
    """Whether a Hugging Face tensor is one in which transformers has fused the experts of a layer."""
    return _FUSED_EXPERTS.fullmatch(name) is not None


def expert_tensors(name: str, shape: Sequence[int]) -> dict[str, tuple[int, slice]]:
    """The experts' own tensors in a fused one of transformers: name to expert and rows; {} for any other.

    ``experts.gate_up_proj`` is [experts, 2 ffn, hidden], gate over up; ``experts.down_proj`` is [experts,
    hidden, ffn]. transformers keeps experts so in memory, and in folders that it saves with
    ``save_original_format=False``; the hub's folders and all of ours have a tensor for each expert.
    """
    match = _FUSED_EXPERTS.fullmatch(name)
    if match is None or len(shape) != 3:
        return {}
    count, rows, _ = shape
    own = ("gate_proj", "up_proj") if match[2] == "gate_up" else ("down_proj",)
    each = rows // len(own)
    return {
        f"{match[1]}{expert}.{kind}.weight": (expert, slice(place * each, (place + 1) * each))
        for expert in range(count)
        for place, kind in enumerate(own)
    }


def fused_rows(name: str, shape: Sequence[int]) -> int | None:
    """Rows of each projection that a tensor of fused experts stacks; None for a tensor of one projection."""
    return next((own.start for _, own in expert_tensors(name, shape).values() if own.start), None)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# Transformer Engine fuses a norm into the linear layer that follows it and names it there. Checkpoints do
# so too, whichever of the two wrote them.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_UNFUSED_NORMS = {plain: fused for fused, plain in _FUSED_NORMS.items()}
_LOCAL_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.weight)|(linear_fc[12]\.weight)(\d+))"
)
"""An expert's parameter in a model chunk: megatron's SequentialMLP, or Transformer Engine's grouped layer."""
_EXPERT = re.compile(r"mlp\.experts\.\d+\.")


def canonical_name(name: str, first_layer: int, first_expert: int = 0) -> tuple[str, int | None]:
    """Name in the parameter map of a model chunk's parameter, and its layer number in the whole model.

    ``first_layer``, ``first_expert``: numbers of the chunk's first layer and of the rank's first expert,
    because each pipeline stage and each rank of EP counts from 0.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name, None
    suffix = _FUSED_NORMS.get(match[2], match[2])
    if expert := _LOCAL_EXPERT.fullmatch(suffix):
        number = first_expert + int(expert[1] or expert[4])
        suffix = f"mlp.experts.{number}.{expert[2] or expert[3]}"
    return f"decoder.layers.{{layer}}.{suffix}", first_layer + int(match[1])


def checkpoint_key(name: str, stacked: bool = True, sparse: bool = False) -> str:
    """Key in a torch_dist checkpoint of the parameter ``name`` of the map.

    ``stacked``: all layers under one key, with a dimension for the layer in front of the parameter's own;
    otherwise a key for each, with ``{layer}`` in it as in the table's name. All experts are under one key in
    any case, with a dimension for the expert. ``sparse``: of a model with experts, where the norm before them
    keeps its own name.
    """
    prefix, layer, suffix = name.partition("decoder.layers.{layer}.")
    if not layer:
        return prefix
    suffix = _EXPERT.sub("mlp.experts.experts.", suffix)
    if not (sparse and suffix == "pre_mlp_layernorm.weight"):
        suffix = _UNFUSED_NORMS.get(suffix, suffix)
    return ("decoder.layers." if stacked else layer) + suffix


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
