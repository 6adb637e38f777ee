"""Kinds of layers in megatron-core: what each adds to the configuration, to the spec of a layer, and marks.

A kind names its builder by path (``Kind.builder``). ``model.py`` makes a spec for each different layer of a
model: megatron's for attention and an MLP, on Transformer Engine or on torch, which the builders of its
kinds change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from bapo_megatron.errors import ConfigError
from bapo_megatron.layers import Block, Kind
from bapo_megatron.policy import device
from bapo_megatron.policy.attention import DocumentAttention
from bapo_megatron.policy.device import has_te_attention, pack_attention
from bapo_megatron.policy.experts import replaying
from bapo_megatron.policy.megatron_versions import activation, marks_cut_experts, submodules_of
from bapo_megatron.runtime.dotted_path import load_dotted_path


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of torch, of w or 1 + w, marked so that SP sums its gradient over the TP ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered: bool = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.zero_centered:
            return super().forward(x)
        scale = 1 + self.weight.float()  # 1 + w in bfloat16 would lose most of w
        return F.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)


def swiglu(stacked: Tensor) -> Tensor:
    """SwiGLU of stacked gate and up: silu(gate) x up, in megatron's place for an activation of another.

    Bit for bit the values and gradients of megatron's own, which on a CPU adds a zero offset to up, and puts
    the two gradients together by a copy.
    """
    gated: Tensor = _SwiGlu.apply(stacked)  # type: ignore[no-untyped-call]
    return gated


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stacked: Tensor) -> Tensor:
        gate, up = stacked.chunk(2, -1)
        active = torch.nn.functional.silu(gate)
        ctx.save_for_backward(stacked, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        stacked, active = ctx.saved_tensors
        gate, up = stacked.chunk(2, -1)
        grad_stacked = torch.empty_like(stacked)
        grad_gate, grad_up = grad_stacked.chunk(2, -1)
        torch.mul(grad, active, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_stacked


def norm_class(te: bool) -> type:
    """The class of norms that are modules of their own."""
    if not te:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm  # type: ignore[no-any-return]


class Builder:
    """Builder of a kind of layer, on Transformer Engine's layers (``te``) or torch's."""

    recomputed: ClassVar[str | None] = None
    """Megatron's name of the module that "selective" recomputes."""

    def __init__(self, kind: Any, te: bool) -> None:
        self.kind, self.te = kind, te

    def config(self) -> dict[str, object]:
        """Its fields of TransformerConfig."""
        return {}

    def install(self, spec: ModuleSpec, config: TransformerConfig, longest: int) -> None:
        """Put its modules into the spec of a layer. ``longest``: length of the longest document."""

    def mark(self, layer: Any) -> None:
        """Mark the parameters of a layer, where megatron's own marks are not enough."""


def builders(kinds: Iterable[Kind], te: bool) -> list[Builder]:
    """The builders of kinds."""
    return [load_dotted_path("builder", kind.builder, "class")(kind, te) for kind in kinds]


def layer_spec(block: Block, config: TransformerConfig, te: bool, longest: int) -> ModuleSpec:
    """The spec of one transformer layer. ConfigError if this GPU has no attention kernel for ``longest``."""
    if te:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    if config.use_te_activation_func:
        submodules_of(spec.submodules.mlp).activation_func = activation(swiglu)
    for builder in builders(block.kinds, te):
        builder.install(spec, config, longest)
    return spec


class AttentionBuilder(Builder):
    """Builder of attention: the core attention of packs, and norms of queries and keys."""

    recomputed = "core_attn"

    def config(self) -> dict[str, object]:
        return {
            "num_attention_heads": self.kind.heads,
            "num_query_groups": self.kind.kv_heads,
            "kv_channels": self.kind.head_dim,
            "add_qkv_bias": self.kind.qkv_bias,
            "qk_layernorm": self.kind.qk_norm,
        }

    def install(self, spec: ModuleSpec, config: TransformerConfig, longest: int) -> None:
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = _te_attention(config, longest) if self.te else DocumentAttention
        if self.kind.qk_norm and not self.te:
            attention.q_layernorm = attention.k_layernorm = RMSNorm


class GatedAttentionBuilder(AttentionBuilder):
    """Builder of attention with an output gate, in a model whose norms are of 1 + w."""

    def config(self) -> dict[str, object]:
        gated = {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
        return {**super().config(), **gated}


def _te_attention(config: TransformerConfig, longest: int) -> type:
    """Transformer Engine's attention; torch's where Transformer Engine has no kernel for packs."""
    attention = pack_attention()
    if not has_te_attention(config, longest):
        if problem := device.varlen_problem():
            raise ConfigError(f"Transformer Engine has no attention for packs on this GPU, and {problem}")
        _announce_torch_attention()
        attention = DocumentAttention
    if attention is not DocumentAttention or config.context_parallel_size == 1:
        # These kernels keep no scores, and no other rank's keys: recomputed, a layer would keep more, and run
        # them once more.
        config.recompute_modules = [name for name in config.recompute_modules if name != "core_attn"]
    return attention


@lru_cache(maxsize=1)
def _announce_torch_attention() -> None:
    if dist.get_rank() == 0:
        print(
            "attention is torch's variable-length kernel: Transformer Engine has none for packs on this GPU "
            "(it has with flash-attn installed, and on Hopper and newer)",
            file=sys.stderr,
            flush=True,
        )


class MlpBuilder(Builder):
    """Builder of a dense MLP, which is megatron's."""

    recomputed = "mlp"


def _router_product(te: bool) -> Callable[..., Any] | None:
    """Transformer Engine's product for the router's logits; None: torch's, as of the other torch layers.

    megatron takes the former wherever the package is installed, also on a CPU, where its kernel ends the
    process.
    """
    if not te:
        return None
    from megatron.core.extensions.transformer_engine import te_general_gemm

    return te_general_gemm  # type: ignore[no-any-return]


class ExpertsBuilder(Builder):
    """Builder of a mixture of experts, whose routers replay routes."""

    recomputed = "moe"  # megatron ignores "mlp" in layers with experts

    def config(self) -> dict[str, object]:
        moe_utils.te_general_gemm = _router_product(self.te)
        return {
            "num_moe_experts": self.kind.count,
            "moe_ffn_hidden_size": self.kind.ffn,
            "moe_router_topk": self.kind.per_token,
            "moe_router_pre_softmax": not self.kind.normalized,
            # In bfloat16 nearly equal logits change places between engine and trainer.
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": self.te,
            "moe_permute_fusion": self.te,
            "moe_router_fusion": False,
        }

    def install(self, spec: ModuleSpec, config: TransformerConfig, longest: int) -> None:
        layer = spec.submodules
        layer.mlp = gpt_layer_specs.get_mlp_module_spec(self.te, self.kind.count, config.moe_grouped_gemm)
        layer.pre_mlp_layernorm = norm_class(self.te)
        if config.use_te_activation_func:
            mixture = submodules_of(layer.mlp)
            for experts in (mixture.experts, mixture.shared_experts):
                submodules_of(experts).activation_func = activation(swiglu)
        # Transformer Engine has no fused norm before experts: in its checkpoints the norm has its own name.
        layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        replaying(spec)

    def mark(self, layer: Any) -> None:
        """Mark experts' parameters as no copies of each other over TP, CP and DP, whatever EP is.

        Megatron does so for EP > 1 alone. Without the mark, experts that TP repeats (ETP < TP) would keep the
        gradient of their own rank's tokens, and a checkpoint of EP 1 has another form of optimizer than of EP
        2. ETP cuts all of them: without that mark the gradient norm counts those of the first rank of ETP
        alone.
        """
        for parameter in layer.mlp.experts.parameters():
            parameter.allreduce = False
            if not marks_cut_experts():
                parameter.tensor_model_parallel = True


class SharedExpertsBuilder(ExpertsBuilder):
    """Builder of a mixture of experts beside a gated shared expert, which is megatron's."""

    def config(self) -> dict[str, object]:
        own = {"moe_shared_expert_intermediate_size": self.kind.shared, "moe_shared_expert_gate": True}
        return {**super().config(), **own}
