"""Layer specs of megatron-core, made by one ``Builder`` for each kind of layer (attention, MLP, experts).

A kind (``bapo_megatron.layers``) names its builder class by dotted path. When a rank builds its model,
``model.py`` merges the builders' TransformerConfig fields, calls ``layer_spec`` (megatron's spec of attention
and an MLP, on Transformer Engine or torch, edited by the layer's builders), and lets the builders set the
parameter attributes by which megatron reduces gradients (``allreduce``). For a new kind, subclass
``Builder``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from bapo_megatron.layers import Block, Kind
from bapo_megatron.policy.attention import DocumentAttention
from bapo_megatron.policy.device import has_te_attention, pack_attention
from bapo_megatron.policy.experts import ReplayLayer, ReplayRouter
from bapo_megatron.policy.megatron_versions import activation, marks_cut_experts, submodules_of
from bapo_megatron.runtime.dotted_path import load_dotted_path


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, scaled by w or 1 + w (``layernorm_zero_centered_gamma``). Its weight has the attribute
    ``sequence_parallel``, so that megatron sums the gradient over TP ranks under SP."""

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
    """SwiGLU of stacked gate and up: silu(gate) x up, as a replacement activation for megatron's MLP.

    Bit for bit the values and gradients of megatron's own, which on a CPU adds a zero offset to up and copies
    the two gradients together.
    """
    gated: Tensor = _SwiGlu.apply(stacked)  # type: ignore[no-untyped-call]
    return gated


class _SwiGlu(torch.autograd.Function):
    """Autograd function of ``swiglu``: saves its input and silu(gate) for the backward pass."""

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
    """The class of norms that are not fused into a linear layer: ``RMSNorm``, or Transformer Engine's."""
    if not te:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm  # type: ignore[no-any-return]


class Builder:
    """Base class of builders: ``config`` returns TransformerConfig fields, ``install`` edits a layer's spec
    in place, ``mark`` sets attributes of a built layer's parameters. ``te``: use Transformer Engine."""

    recomputed: ClassVar[str | None] = None
    """Megatron's name of the module recomputed by "selective"; None for none."""

    def __init__(self, kind: Any, te: bool) -> None:
        self.kind, self.te = kind, te

    def config(self) -> dict[str, object]:
        """Return the kind's TransformerConfig fields."""
        return {}

    def install(self, spec: ModuleSpec, config: TransformerConfig, longest: int) -> None:
        """Put the kind's modules into a layer's spec. ``longest``: length of the longest document."""

    def mark(self, layer: Any) -> None:
        """Set attributes of a layer's parameters that megatron does not set itself."""


def builders(kinds: Iterable[Kind], te: bool) -> list[Builder]:
    """The builders of the given kinds."""
    return [load_dotted_path("builder", kind.builder, "class")(kind, te) for kind in kinds]


def layer_spec(block: Block, config: TransformerConfig, te: bool, longest: int) -> ModuleSpec:
    """The spec of one transformer layer, for documents of up to ``longest`` tokens."""
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
    """Builder of attention. ``config`` returns head counts and width, QKV bias and query-key norms.
    ``install`` sets the core attention, which takes a ``DocumentPack``, and, without Transformer Engine,
    ``RMSNorm`` as query and key norm."""

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
        fused = self.te and has_te_attention(config, longest)
        attention.core_attention = pack_attention() if fused else DocumentAttention
        if self.kind.qk_norm and not self.te:
            attention.q_layernorm = attention.k_layernorm = RMSNorm


class GatedAttentionBuilder(AttentionBuilder):
    """Builder of attention with an output gate; its config fields also make all norms scale by 1 + w."""

    def config(self) -> dict[str, object]:
        gated = {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
        return {**super().config(), **gated}


class MlpBuilder(Builder):
    """Builder of megatron's dense MLP, which the spec has already: only names the module to recompute."""

    recomputed = "mlp"


class ExpertsBuilder(Builder):
    """Builder of a mixture of experts that replays the engine's routes. ``mark`` marks the experts'
    parameters for megatron at any EP."""

    recomputed = "moe"  # megatron ignores "mlp" in layers with experts

    def config(self) -> dict[str, object]:
        return {
            "num_moe_experts": self.kind.count,
            "moe_ffn_hidden_size": self.kind.ffn,
            "moe_router_topk": self.kind.per_token,
            "moe_router_pre_softmax": not self.kind.normalized,
            # In bfloat16 nearly equal logits swap order between engine and trainer.
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
        mixture = submodules_of(layer.mlp)
        if config.use_te_activation_func:
            for experts in (mixture.experts, mixture.shared_experts):
                submodules_of(experts).activation_func = activation(swiglu)
        # Transformer Engine fuses no norm before experts: its checkpoints have a separate name for the norm.
        layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        spec.module, mixture.router = ReplayLayer, ReplayRouter

    def mark(self, layer: Any) -> None:
        """Set ``allreduce`` to False on expert parameters: megatron reduces their gradients over expert DP.

        Megatron does so only for EP > 1. Without it, experts replicated over TP (ETP < TP) would keep only
        the gradient of their own rank's tokens, and the optimizer layout of a checkpoint would differ between
        EP 1 and 2. ETP shards all of them: without ``tensor_model_parallel`` the gradient norm would count
        only the first ETP rank's.
        """
        for parameter in layer.mlp.experts.parameters():
            parameter.allreduce = False
            if not marks_cut_experts():
                parameter.tensor_model_parallel = True


class SharedExpertsBuilder(ExpertsBuilder):
    """Builder of a mixture of experts that also has megatron's gated shared expert."""

    def config(self) -> dict[str, object]:
        own = {"moe_shared_expert_intermediate_size": self.kind.shared, "moe_shared_expert_gate": True}
        return {**super().config(), **own}
