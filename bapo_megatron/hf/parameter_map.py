"""Parameter map: which rows of which Hugging Face tensors form each megatron-core parameter.

``mapping_table(shape)`` returns a ``Mapping`` for each megatron parameter name. Weights in memory are loaded
and sent by it (``policy/weight_map.py``), checkpoint files converted (``checkpoints_tools``), so nothing here
needs torch. The kinds of a layer define its parameters (``layers/``). ``tensor_problems`` compares a folder's
tensors with the map.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bapo_megatron.hf.config import ModelShape
from bapo_megatron.layers import Block, Mapping, plain
from bapo_megatron.layers.mlp import EXPERTS

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]
"""Tensor shapes by Hugging Face name."""


def mapping_table(shape: ModelShape) -> dict[str, Mapping]:
    """A model's parameter map: from megatron names (``{layer}`` for the layer number) to mappings."""
    embedding = plain(embedding_name(shape), (shape.vocab, shape.hidden), tp_dim=0)
    table = {"embedding.word_embeddings.weight": embedding}
    own = f"{shape.body}layers.{{layer}}."
    for kind in shape.kinds:
        layers = shape.layers_of(kind)
        for name, mapping in kind.parameters(shape.hidden).items():
            key = f"decoder.layers.{{layer}}.{name}"
            hf_names = tuple(own + hf_name for hf_name in mapping.hf_names)
            others = table[key].layers if key in table else None  # several kinds share a norm
            if others and table[key].hf_shapes != mapping.hf_shapes:
                raise ValueError(f"{key} has two shapes in layers of two kinds")
            served = mapping.served and own + mapping.served
            each = tuple(own + hf_name for hf_name in mapping.served_each)
            having = tuple(sorted((*layers, *(others or ()))))
            table[key] = replace(mapping, hf_names=hf_names, served=served, served_each=each, layers=having)
    table["decoder.final_layernorm.weight"] = plain(f"{shape.body}norm.weight", (shape.hidden,))
    if not shape.tied:
        table["output_layer.weight"] = plain(OUTPUT, (shape.vocab, shape.hidden), tp_dim=0)
    return table


def embedding_name(shape: ModelShape) -> str:
    """Hugging Face name of a model's embedding."""
    return f"{shape.body}embed_tokens.weight"


def hf_tensors(shape: ModelShape) -> Shapes:
    """All tensors of a model's HF folder, with their shapes, in natural order."""
    expected: Shapes = {}
    for mapping in mapping_table(shape).values():
        for layer in mapping.places:
            for hf_name, hf_shape in zip(mapping.hf_names, mapping.hf_shapes, strict=True):
                expected[hf_name.format(layer=layer)] = hf_shape
    return expected


def kept_in_float32(shape: ModelShape) -> set[str]:
    """Names of the tensors that stay float32 in a model of any dtype."""
    return {
        hf_name.format(layer=layer)
        for mapping in mapping_table(shape).values()
        if mapping.dtype == "float32"
        for layer in mapping.places
        for hf_name in mapping.hf_names
    }


def tensor_problems(found: Shapes, shape: ModelShape) -> list[str]:
    """Problems of a folder's tensors, ``found`` with their shapes: missing, unknown or misshapen. A tied
    model may contain a copy of the embedding under the output layer's name."""
    expected = hf_tensors(shape)
    known = {*expected, OUTPUT} if shape.tied else {*expected}
    return [
        *(f"tensor {name} is missing" for name in expected if name not in found),
        *(
            f"tensor {name} is not of this model family"
            for name in found
            if name not in known and not name.startswith(shape.untrained)
        ),
        *(
            f"tensor {name} has shape {list(found[name])}, config.json asks for {list(wanted)}"
            for name, wanted in expected.items()
            if name in found and found[name] != wanted
        ),
    ]


_FUSED_EXPERTS = re.compile(r"(model\..*\.mlp\.experts\.)(gate_up|down)_proj")
_OF_EXPERT = re.compile(r"(model\..*\.mlp\.experts\.)\d+\.(gate|up|down)_proj\.weight")


def is_fused_experts(name: str) -> bool:
    """Whether a Hugging Face tensor fuses a layer's experts, as in transformers."""
    return _FUSED_EXPERTS.fullmatch(name) is not None


def expert_tensors(name: str, shape: Sequence[int]) -> dict[str, tuple[int, slice]]:
    """The experts' separate tensors in the fused tensor ``name``: name to (expert, rows). {} if not fused.

    ``experts.gate_up_proj`` is [experts, 2 ffn, hidden], gate over up; ``experts.down_proj`` is [experts,
    hidden, ffn]. transformers fuses experts in memory and with ``save_original_format=False``; so do the
    hub's hybrids except in fp8. All other folders have a tensor per expert.
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


def fused_experts(tensors: Iterable[str]) -> dict[str, list[str]]:
    """Fused tensors, named as in transformers, of the given expert tensors: name to parts in order."""
    fused: dict[str, list[str]] = {}
    for name in tensors:
        if match := _OF_EXPERT.fullmatch(name):
            kind = "down" if match[2] == "down" else "gate_up"
            fused.setdefault(f"{match[1]}{kind}_proj", []).append(name)
    return fused


def fused_rows(name: str, shape: Sequence[int]) -> int | None:
    """Rows of each projection stacked in a fused expert tensor; None for a single projection."""
    return next((own.start for _, own in expert_tensors(name, shape).values() if own.start), None)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# Transformer Engine fuses a norm into the next linear layer and names it there. So do checkpoints, whoever
# wrote them (``Kind.norm_keys``).
_FUSED_NORM = re.compile(r"(self_attention|mlp)\.\w+\.layer_norm_weight")
_NORMS = {"self_attention": "input_layernorm.weight", "mlp": "pre_mlp_layernorm.weight"}
_LOCAL_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.weight)|(linear_fc[12]\.weight)(\d+))"
)
"""An expert's parameter in a model chunk: megatron's SequentialMLP, or Transformer Engine's grouped layer."""
_EXPERT = re.compile(r"mlp\.experts\.\d+\.")


def canonical_name(name: str, first_layer: int, first_expert: int = 0) -> tuple[str, int | None]:
    """Parameter-map name of a model chunk's parameter, and its layer number in the whole model.

    ``first_layer``, ``first_expert``: numbers of the chunk's first layer and the rank's first expert, because
    each pipeline stage and EP rank counts from 0.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name, None
    fused = _FUSED_NORM.fullmatch(match[2])
    suffix = _NORMS[fused[1]] if fused else match[2]
    if expert := _LOCAL_EXPERT.fullmatch(suffix):
        number = first_expert + int(expert[1] or expert[4])
        suffix = f"mlp.experts.{number}.{expert[2] or expert[3]}"
    return f"decoder.layers.{{layer}}.{suffix}", first_layer + int(match[1])


def checkpoint_keys(name: str, block: Block, stacked: bool = True) -> tuple[str, ...]:
    """torch_dist checkpoint keys of the map's parameter ``name``: as written here, then by other writers.

    ``block``: the layer's. ``stacked``: all layers share one key, with a leading layer dimension; otherwise
    each has its own, with ``{layer}`` as in ``name``. All experts always share one key, with an expert
    dimension.
    """
    prefix, layer, suffix = name.partition("decoder.layers.{layer}.")
    if not layer:
        return (prefix,)
    own = block.keys(_EXPERT.sub(EXPERTS, suffix))
    return tuple(("decoder.layers." if stacked else layer) + key for key in own)
