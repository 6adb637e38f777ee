"""The layer spec for megatron-core: Transformer Engine (GPU, half precision, if installed), else torch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec

from bapo_megatron.policy import device
from bapo_megatron.policy.attention.core import DocumentAttention


def layer_spec(qk_norm: bool, dtype: torch.dtype) -> tuple[ModuleSpec, type]:
    """The spec of one layer, and the class of the final norm."""
    if device.uses_transformer_engine(dtype):
        from megatron.core.extensions.transformer_engine import TENorm

        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm), TENorm
    return _torch_layer_spec(qk_norm), RMSNorm


def _torch_layer_spec(qk_norm: bool) -> ModuleSpec:
    spec = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = DocumentAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that sequence parallelism sums its gradient over the TP ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
