"""The model builder: this rank's megatron-core GPTModel chunks, from the shape of a Hugging Face model.

Layers are Transformer Engine's (GPU, half precision, installed), or torch's (``layer_spec``). Weights are not
loaded here (``weight_map.py``). Megatron's process groups must exist (``layout.py``). Used by ``megatron.py``
and ``passes.py``.
"""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from bapo_megatron.config import BatchConfig, ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.policy import device
from bapo_megatron.policy.attention import DocumentAttention, DocumentPack
from bapo_megatron.policy.device import has_cuda, has_te_attention, pack_attention
from bapo_megatron.policy.experts import PackLoad, PackRoutes, UpdateTally, replaying, unknown_T
from bapo_megatron.policy.layout import chunk_layers
from bapo_megatron.policy.positions import Rotary
from bapo_megatron.tensor_types import MicroBatch


def transformer_config(
    shape: ModelShape, parallel: ParallelConfig, batch: BatchConfig, dtype: torch.dtype
) -> TransformerConfig:
    """The megatron-core TransformerConfig of the model."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.attention.heads,
        num_query_groups=shape.attention.kv_heads,
        kv_channels=shape.attention.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.attention.qkv_bias,
        qk_layernorm=shape.attention.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        pipeline_model_parallel_layout=_uneven_stages(shape, parallel),
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are overwritten by the checkpoint, yet initializing them is what marks parameters as
        # tensor parallel, which the gradient norm relies on.
        perform_initialization=True,
        use_cpu_initialization=not has_cuda(),
        calculate_per_token_loss=True,
        # Compiled, SwiGLU keeps its input alone; on a CPU, where nothing is compiled, it is slower.
        bias_activation_fusion=has_cuda(),
        apply_rope_fusion=device.uses_transformer_engine(dtype),
        # Fusions that need apex, or a feature that these models lack.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,  # see _add_gradients_in_float32
        # Else Transformer Engine's layers overwrite gradients in a process's first pass, not add to them.
        disable_parameter_transpose_cache=True,
        # Batched point-to-point calls give wrong results with the interleaved schedule on gloo.
        batch_p2p_comm=has_cuda(),
        batch_p2p_sync=False,  # a host sync after each message, which only old versions of torch need
        # Stages send each other the length of each pack; the interleaved schedule cannot.
        variable_seq_lengths=parallel.pipeline > 1 and parallel.virtual == 1,
        moe_token_dispatcher_type="alltoall",  # variable lengths require it, also without experts
        **_experts(shape, parallel, dtype),
        **_recompute(batch, shape),
    )


def _uneven_stages(shape: ModelShape, parallel: ParallelConfig) -> list[list[str]] | None:
    """Megatron's list of what each model chunk has, in the model's order; None if their layers are equal."""
    sizes = chunk_layers(parallel, shape.layers)
    if len(set(sizes)) == 1:
        return None
    chunks = [["decoder"] * size for size in sizes]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _experts(shape: ModelShape, parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, object]:
    if shape.experts is None:
        return {}
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # megatron's router asks for it, also where the package is missing
    return {
        "num_moe_experts": shape.experts.count,
        "moe_ffn_hidden_size": shape.experts.ffn,
        "moe_router_topk": shape.experts.per_token,
        "moe_router_pre_softmax": not shape.experts.normalized,
        # In bfloat16 nearly equal logits change places between engine and trainer.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": device.uses_transformer_engine(dtype),
        "moe_permute_fusion": device.uses_transformer_engine(dtype),
        "moe_router_fusion": False,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def _recompute(batch: BatchConfig, shape: ModelShape) -> dict[str, object]:
    if batch.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if batch.recompute == "selective":
        mlp = "moe" if shape.experts else "mlp"  # megatron ignores "mlp" in layers with experts
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn", mlp]}
    return {}


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose last stage returns hidden states; ``output_head.py`` computes logits and loss.

    A rank has one (a chunk), or one for each of its virtual pipeline stages.
    """

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """The layers' inputs, as megatron-core's; RoPE's table ends with the pack's longest document."""
        hidden, table, *others = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if table is not None:
            # Transformer Engine's kernel starts a block of threads for each row of the table and each
            # document, most of them for nothing: 2.2 million in each call for 67,584 rows and 33 documents.
            table = table[: packed_seq_params.max_seqlen_q]
        return hidden, table, *others

    def _postprocess(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Hidden states [tokens, 1, hidden] of all tokens of the CP rank, on every TP rank.

        Backward: the gradients of the TP ranks are summed.
        """
        if not self.post_process:
            return hidden_states
        enter = (
            gather_from_sequence_parallel_region
            if self.config.sequence_parallel
            else copy_to_tensor_model_parallel_region
        )
        return cast(Tensor, enter(hidden_states, group=self.pg_collection.tp))

    rotary: Rotary | None = None
    """RoPE that the core attention applies; None where megatron-core applies its own."""

    def document_pack(
        self,
        part: MicroBatch,
        device: torch.device,
        tally: UpdateTally | None = None,
        real_T: Tensor | None = None,
    ) -> DocumentPack:
        """The sequence parameters of a pack for the layers: document bounds, RoPE and routes of this rank.

        ``tally``: where the layers of a pass with gradients count how their routers choose, of the tokens
        that are 1 in ``real_T``.
        """
        table = None if self.rotary is None else self.rotary.table(part.position_T)
        routes = self._routes(part, device, tally)
        load = None
        if tally is not None and real_T is not None:
            load = PackLoad(self._routed_here(real_T), tally.load_LC)
        return DocumentPack.of(part.cu_seqlens, part.max_seqlen, device, table, routes, load)

    def _routed_here(self, column: Tensor) -> Tensor:
        """The part of a column of the CP rank's tokens that this rank routes: SP's, if there is any."""
        if not self.config.sequence_parallel:
            return column
        group = self.pg_collection.tp
        return cast(Tensor, column.chunk(group.size())[group.rank()])

    def _routes(self, part: MicroBatch, device: torch.device, tally: UpdateTally | None) -> PackRoutes | None:
        """The routes of a pack through this chunk's layers, for the tokens that this rank routes."""
        if part.route_TLK is None:
            return None
        first, count = self.decoder.layers[0].layer_number, len(self.decoder.layers)
        # From the host, this chunk's layers alone: a stage of many would hold those of all packs in flight.
        route_TLK = part.route_TLK[:, first - 1 : first - 1 + count].to(device, non_blocking=True)
        same_T = (part.mask_T > 0) & (part.version_T == (-1 if tally is None else tally.version))
        route_TLK, known_T, same_T = map(self._routed_here, (route_TLK, ~unknown_T(route_TLK), same_T))
        counts = None if tally is None else tally.counts
        return PackRoutes(route_TLK, known_T, same_T, first, part.replays_routes, counts)

    @property
    def output_weight(self) -> Tensor:
        """This rank's shard of the output layer, [vocabulary / TP, hidden]."""
        tied = self.share_embeddings_and_output_weights
        return cast(Tensor, self.shared_embedding_or_output_weight() if tied else self.output_layer.weight)


def build_chunks(
    config: TransformerConfig, shape: ModelShape, max_positions: int, longest: int
) -> list[PolicyModel]:
    """The model chunks of this pipeline stage: one, or one for each virtual stage.

    Their weights are not loaded. ``longest``: length of the longest document, at most ``max_positions``.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    layer = layer_spec(config, longest)
    chunks = [_chunk(config, shape, max_positions, stage, layer) for stage in stages]
    for chunk in chunks:
        if chunk.rotary is None:
            chunk.rotary_pos_emb.get_rotary_seq_len = partial(_rotary_length, longest)
    return chunks


def _rotary_length(longest: int, _context: Any, _decoder: Any, _input: Any, _config: Any, pack: Any) -> int:
    """Length of megatron's RoPE table: the longest document that may come, so one table serves all packs.

    Megatron itself makes one for each pack's longest document, and caches 32 of them: 1.1 GB at 64k tokens.
    ``PolicyModel`` gives the layers the rows that a pack needs.
    """
    return max(longest, int(pack.max_seqlen_q))


def _chunk(
    config: TransformerConfig,
    shape: ModelShape,
    max_positions: int,
    stage: int | None,
    spec: tuple[ModuleSpec, type],
) -> PolicyModel:
    layer, final_norm = spec
    layers = get_num_layers_to_build(config, vp_stage=stage)
    alone = stage is None
    fused = device.uses_transformer_engine(config.params_dtype)
    model = PolicyModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=final_norm),
        vocab_size=shape.vocab,
        max_sequence_length=max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=alone, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=alone, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope" if fused else "none",  # else DocumentAttention applies it
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=shape.rope_scaling or 1.0,
        vp_stage=stage,
    )
    _mark_experts(model)
    if fused:
        _add_gradients_in_float32(model)
    else:
        model.rotary = Rotary(shape.attention.head_dim, shape.rope_theta, shape.rope_scaling)
    return model


def _add_gradients_in_float32(model: PolicyModel) -> None:
    """Let the matrix products of weight gradients add to DDP's float32 buffer (``main_grad``) themselves.

    Else each pack's gradients are rounded to bfloat16, written, and added by another kernel. Megatron's
    ``gradient_accumulation_fusion`` sets the same attribute of Transformer Engine's layers, but builds no
    ``output_layer`` without apex's kernel, which nothing would call here: see ``output_head.py``.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _mark_experts(model: PolicyModel) -> None:
    """Mark experts' parameters as no copies of each other over TP, CP and DP, whatever EP is.

    Megatron does so for EP > 1 alone. Without the mark, experts that TP repeats (ETP < TP) would keep the
    gradient of their own rank's tokens, and a checkpoint of EP 1 has another form of optimizer than of EP 2.
    ETP cuts all of them: without that mark, which they lack on Transformer Engine 2.20, the gradient norm
    counts those of the first rank of ETP alone.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False
                parameter.tensor_model_parallel = True


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

    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
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
    """RMSNorm of torch, marked so that its gradient is summed over the TP ranks in sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
