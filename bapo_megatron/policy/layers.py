"""The layer spec for megatron-core: Transformer Engine's layers (GPU, half precision, installed), or torch's.

``model.py`` builds the model's layers from it. Used by ``model.py``.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from bapo_megatron.errors import ConfigError
from bapo_megatron.policy import device
from bapo_megatron.policy.attention.core import DocumentAttention
from bapo_megatron.policy.attention.te_backend import has_te_attention
from bapo_megatron.policy.route_replay import replaying


def layer_spec(config: TransformerConfig, longest: int) -> tuple[ModuleSpec, type]:
    """The spec of one transformer layer, and the class of the final norm.

    ``longest``: length of the longest document. ConfigError if this GPU has no attention kernel for it.
    """
    if device.uses_transformer_engine(config.params_dtype):
        spec, norm = _te_layer_spec(config, longest)
    else:
        spec, norm = _torch_layer_spec(config), RMSNorm
    return replaying(spec) if config.num_moe_experts else spec, norm


def _te_layer_spec(config: TransformerConfig, longest: int) -> tuple[ModuleSpec, type]:
    """Transformer Engine's layers; torch's attention where Transformer Engine has no kernel for packs."""
    from megatron.core.extensions.transformer_engine import TENorm

    from bapo_megatron.policy.attention.te_attention import PackAttention

    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    attention = PackAttention
    if not has_te_attention(config, longest):
        if problem := device.varlen_problem():
            raise ConfigError(f"Transformer Engine has no attention for packs on this GPU, and {problem}")
        _announce_torch_attention()
        attention = DocumentAttention
    spec.submodules.self_attention.submodules.core_attention = attention
    return spec, TENorm


@lru_cache(maxsize=1)
def _announce_torch_attention() -> None:
    if dist.get_rank() == 0:
        print(
            "attention is torch's variable-length kernel: Transformer Engine has none for packs on this GPU "
            "(it has with flash-attn installed, and on Hopper and newer)",
            file=sys.stderr,
            flush=True,
        )


def _torch_layer_spec(config: TransformerConfig) -> ModuleSpec:
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    if config.num_moe_experts:
        # Transformer Engine has no fused norm before experts: in its checkpoints the norm has its own name.
        names = layer.sharded_state_dict_keys_map
        layer.sharded_state_dict_keys_map = {
            own: stored for own, stored in names.items() if not own.startswith("pre_mlp_layernorm")
        }
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = DocumentAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of torch, marked so that its gradient is summed over the TP ranks in sequence parallelism.

    For layers without Transformer Engine. megatron-core makes one where the layer spec names it.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
