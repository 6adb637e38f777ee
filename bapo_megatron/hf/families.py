"""Model families: ``FAMILIES`` maps config.json's ``model_type`` to a ``Family``, which returns the layers.

Hybrids (Qwen3.5 to 3.8) have Gated DeltaNet layers and, by default in every fourth layer, full attention.
Their folders on the hub are multi-modal: the text model is trained, the rest is kept unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from bapo_megatron.hf.config_fields import flag, integer, real, table
from bapo_megatron.layers import Block, Kind
from bapo_megatron.layers.attention import Attention, GatedAttention
from bapo_megatron.layers.delta_net import DeltaNet
from bapo_megatron.layers.mlp import Experts, Mlp, SharedExperts

_TIED, _PARTIAL = "tie_word_embeddings", "partial_rotary_factor"
_LINEAR, _FULL = "linear_attention", "full_attention"
_INTERVAL = "full_attention_interval"
_QUANTIZATION = "quantization_config"
_ROTATED_BY_DEFAULT = 0.25


def _kv_heads(config: dict[str, Any], family: str, heads: int) -> int:
    """Key and value heads; if the field is missing, the default of the family's transformers class."""
    if "num_key_value_heads" not in config:
        return {"qwen2": 32, "qwen3": 32, "qwen3_moe": 4}.get(family, heads)
    if config["num_key_value_heads"] is None and family != "qwen3_moe":
        return heads
    return integer(config, "num_key_value_heads")


def _head_dim(config: dict[str, Any], family: str, hidden: int, heads: int) -> int:
    """Width of a head; if the field is missing, the default of the family's transformers class."""
    if "head_dim" not in config and family == "qwen3":
        return 128
    if config.get("head_dim") is None:
        return hidden // heads
    return integer(config, "head_dim")


def dense_stack(config: dict[str, Any], qkv_bias: bool = False, qk_norm: bool = False) -> list[Block]:
    """Layers with attention and an MLP."""
    family, heads = config["model_type"], integer(config, "num_attention_heads")
    attention = Attention(
        heads=heads,
        kv_heads=_kv_heads(config, family, heads),
        head_dim=_head_dim(config, family, integer(config, "hidden_size"), heads),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )
    block = Block(attention, Mlp(integer(config, "intermediate_size")))
    return [block] * integer(config, "num_hidden_layers")


def _expert_stack(config: dict[str, Any]) -> list[Block]:
    experts = Experts(**_expert_sizes(config), normalized=flag(config, "norm_topk_prob"))
    return [replace(block, mlp=experts) for block in dense_stack(config, qk_norm=True)]


def _expert_sizes(config: dict[str, Any]) -> dict[str, int]:
    """Sizes of experts: transformers 5 writes ``num_local_experts``, the hub's folders ``num_experts``."""
    return {
        "count": integer(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        "per_token": integer(config, "num_experts_per_tok"),
        "ffn": integer(config, "moe_intermediate_size"),
    }


def _dense_mlp(config: dict[str, Any]) -> Kind:
    return Mlp(integer(config, "intermediate_size"))


def _shared_experts(config: dict[str, Any]) -> Kind:
    """Experts with a shared one; a token's expert weights always sum to 1."""
    if not flag({"norm_topk_prob": True, **config}, "norm_topk_prob"):
        raise ValueError("norm_topk_prob=false is not supported in this family")
    shared = integer(config, "shared_expert_intermediate_size")
    return SharedExperts(**_expert_sizes(config), normalized=True, shared=shared)


def _hybrid_stack(
    config: dict[str, Any], mlp_of: Callable[[dict[str, Any]], Kind] = _dense_mlp
) -> list[Block]:
    count, hidden_dim = integer(config, "num_hidden_layers"), integer(config, "head_dim")
    names = {
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "kernel": "linear_conv_kernel_dim",
    }
    delta = DeltaNet(**{name: integer(config, field) for name, field in names.items()})
    attention = GatedAttention(
        heads=integer(config, "num_attention_heads"),
        kv_heads=integer(config, "num_key_value_heads"),
        head_dim=hidden_dim,
        qk_norm=True,
        rotated=int(hidden_dim * _rotated_part(config)),
    )
    types = layer_types(config)
    by_interval = _types_by_interval(integer({_INTERVAL: 4, **config}, _INTERVAL), count)
    types = types or by_interval
    if len(types) != count or set(types) != {_LINEAR, _FULL}:
        raise ValueError(
            f"layer_types={types!r:.80} cannot be: each of the {count} layers is {_LINEAR} or {_FULL}, and "
            "there are both"
        )
    if _INTERVAL in config and types != by_interval:
        raise ValueError(f"layer_types and {_INTERVAL}={config[_INTERVAL]} contradict each other: remove one")
    if not flag({"attn_output_gate": True, **config}, "attn_output_gate"):
        raise ValueError("attn_output_gate=false is not supported in this family")
    mlp = mlp_of(config)
    return [Block(delta if kind == _LINEAR else attention, mlp) for kind in types]


def _types_by_interval(every: int, count: int) -> list[str]:
    return [_LINEAR if layer % every else _FULL for layer in range(1, count + 1)]


def fields_for_servers(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of a hybrid's text config that SGLang reads and transformers omits; empty for other models.

    Servers read neither ``layer_types`` nor the rotated part of a head in ``rope_parameters``. Raises
    ValueError unless full attention is in every n-th layer and no other.
    """
    types = layer_types(config)
    if _LINEAR not in types:
        return {}
    missing: dict[str, Any] = {}
    if _INTERVAL not in config:
        missing[_INTERVAL] = every = types.index(_FULL) + 1
        if types != _types_by_interval(every, len(types)):
            raise ValueError(
                f"layer_types={types!r:.80}: servers need {_FULL} in every n-th layer, and no other"
            )
    if _PARTIAL not in config and _rotated_part(config) != _ROTATED_BY_DEFAULT:
        missing[_PARTIAL] = _rotated_part(config)
    return missing


def _rotated_part(config: dict[str, Any]) -> float:
    """Fraction of a head rotated by RoPE, a quarter by default. Raises ValueError if two fields differ."""
    places = (table(config, "rope_parameters"), table(config, "rope_scaling"), config)
    parts = {real(place, _PARTIAL) for place in places if place.get(_PARTIAL) is not None} or {
        _ROTATED_BY_DEFAULT
    }
    if len(parts) > 1 or not 0 < min(parts) <= 1:
        raise ValueError(f"{_PARTIAL}={sorted(parts)} cannot be")
    return min(parts)


@dataclass(frozen=True)
class Family:
    """Model family: ``stack`` returns the layers of a model with a given config.json; other fields describe
    tensor names, the storage of experts, untrained tensors, and names in SGLang."""

    title: str
    served: str | None = None
    """Server class with the weight layout described by the layer kinds; None: unknown."""
    stack: Callable[[dict[str, Any]], list[Block]] = dense_stack
    """Maps a config.json, its text model's fields, to the layers in order. Raises KeyError or ValueError."""
    allows: tuple[str, ...] = ()
    """Settings rejected by ``_refuse_variants`` in other families."""
    text: str | None = None
    """Field of a multi-modal config.json with the text model, the trained part."""
    body: str = "model."
    """Prefix of all tensor names except the output layer's."""
    experts: Literal["apart", "as_read", "fused"] = "apart"
    """Experts in written folders: in separate tensors; as in the model's folder; or fused in two tensors."""
    untrained: tuple[str, ...] = ()
    """Prefixes of untrained tensors in the folder."""
    served_names: tuple[tuple[str, str], ...] = ()
    """Replacements, in order, that turn a Hugging Face tensor name into the servers'."""

    def text_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Fields of the text model. Raises ValueError if two fields contradict each other."""
        if self.text is None:
            return config
        own = dict(table(config, self.text))
        if len({flag(place, _TIED) for place in (own, config) if place.get(_TIED) is not None}) > 1:
            raise ValueError(f"{_TIED} is not the same in {self.text}: make the two equal")
        if own.get(_QUANTIZATION):
            raise ValueError(f"{_QUANTIZATION} is read beside {self.text}, not in it: move it there")
        names = (_TIED, _QUANTIZATION)
        outer = {name: config[name] for name in names if config.get(name) is not None}
        return {**own, **outer, "model_type": config["model_type"]}


def layer_types(config: dict[str, Any]) -> list[str]:
    """Attention type of each layer; empty if missing. Raises ValueError unless it is a list of texts."""
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(kind, str) for kind in types)):
        raise ValueError(f"layer_types={types!r:.80} is not a list of texts")
    return types or []


_OF_HYBRIDS = ("layer_types", _PARTIAL)
_SERVED_HYBRID = ((".self_attn.", "."), ("model.language_model.", "model."))


def _hybrid_expert_stack(config: dict[str, Any]) -> list[Block]:
    return _hybrid_stack(config, _shared_experts)


_HYBRID = partial(Family, allows=_OF_HYBRIDS, served_names=_SERVED_HYBRID)
_MULTIMODAL = partial(
    _HYBRID, text="text_config", body="model.language_model.", untrained=("model.visual.", "mtp.")
)

FAMILIES = {
    "qwen2": Family(
        "Qwen2 / Qwen2.5", "Qwen2ForCausalLM", partial(dense_stack, qkv_bias=True), allows=("attention_bias",)
    ),
    "qwen3": Family("Qwen3 dense", "Qwen3ForCausalLM", partial(dense_stack, qk_norm=True)),
    "qwen3_moe": Family("Qwen3 MoE", "Qwen3MoeForCausalLM", _expert_stack),
    "llama": Family("Llama 3", "LlamaForCausalLM"),
    "qwen3_5_text": _HYBRID("Qwen3.5 to 3.8 dense, text alone", "Qwen3_5ForCausalLM", _hybrid_stack),
    "qwen3_5": _MULTIMODAL("Qwen3.5 to 3.8 dense", "Qwen3_5ForConditionalGeneration", _hybrid_stack),
    "qwen3_5_moe_text": _HYBRID(
        "Qwen3.5 and 3.6 MoE, text alone", "Qwen3_5MoeForCausalLM", _hybrid_expert_stack, experts="as_read"
    ),
    "qwen3_5_moe": _MULTIMODAL(
        "Qwen3.5 and 3.6 MoE",
        "Qwen3_5MoeForConditionalGeneration",
        _hybrid_expert_stack,
        experts="fused",
    ),
}
