"""Model construction: this rank's megatron-core GPTModel chunks, from the shape of a Hugging Face model.

``transformer_config`` returns the configuration; ``build_chunks`` returns ``PolicyModel`` chunks, whose
weights ``weight_map.py`` loads. Layers are Transformer Engine's (on a GPU, in half precision, if installed)
or torch's (``layers.py``). Megatron's process groups must exist (``layout.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from bapo_megatron.config import BatchConfig, ParallelConfig
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.policy import device
from bapo_megatron.policy.attention import DocumentPack
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.policy.experts import PackLoad, PackRoutes, RouterCounters, unknown_T
from bapo_megatron.policy.layers import Builder, builders, layer_spec, norm_class
from bapo_megatron.policy.layout import chunk_layers
from bapo_megatron.policy.positions import Rotary
from bapo_megatron.tensor_types import MicroBatch


def transformer_config(
    shape: ModelShape, parallel: ParallelConfig, batch: BatchConfig, dtype: torch.dtype
) -> TransformerConfig:
    """The megatron-core TransformerConfig of the model. Also chooses this process's matmul of routers."""
    te = device.uses_transformer_engine(dtype)
    device.choose_router_matmul(te)
    kinds = builders(shape.kinds, te)
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        pipeline_model_parallel_layout=_uneven_stages(shape, parallel),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The checkpoint overwrites the weights, but initialization also marks parameters as tensor parallel,
        # on which the gradient norm relies.
        perform_initialization=True,
        use_cpu_initialization=not has_cuda(),
        calculate_per_token_loss=True,
        # Compiled, SwiGLU keeps only its input; on a CPU, uncompiled, it is slower.
        bias_activation_fusion=has_cuda(),
        use_te_activation_func=not has_cuda() and not te,  # the MLP spec's: layers.swiglu
        apply_rope_fusion=te,
        # Fusions that need apex, or a feature absent from these models.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,  # see _add_gradients_in_float32
        # Otherwise Transformer Engine's layers overwrite gradients in the first pass instead of adding to
        # them.
        disable_parameter_transpose_cache=True,
        # Batched point-to-point calls give wrong results with the interleaved schedule on gloo.
        batch_p2p_comm=has_cuda(),
        batch_p2p_sync=False,  # a host sync after each message, needed only by old torch versions
        # Stages exchange the length of each pack; the interleaved schedule cannot.
        variable_seq_lengths=parallel.pipeline > 1 and parallel.virtual == 1,
        hetereogenous_dist_checkpoint=not shape.is_uniform,  # otherwise keys stack the layers
        moe_token_dispatcher_type="alltoall",  # required by variable lengths, even without experts
        **_of_kinds(kinds),
        **_recompute(batch, kinds),
    )
    if te and (parallel.context == 1 or device.has_te_attention(config, batch.pack_tokens)):
        # These kernels keep no scores and no other rank's keys: recomputation would keep more and rerun them.
        config.recompute_modules = [name for name in config.recompute_modules if name != "core_attn"]
    return config


def _uneven_stages(shape: ModelShape, parallel: ParallelConfig) -> list[list[str]] | None:
    """Megatron's list of each model chunk's modules, in model order; None if all chunks are equally long."""
    sizes = chunk_layers(parallel, shape.layers)
    if len(set(sizes)) == 1:
        return None
    chunks = [["decoder"] * size for size in sizes]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _of_kinds(kinds: Sequence[Builder]) -> dict[str, object]:
    """Merge the TransformerConfig fields of the kinds. Raises ValueError if two of them conflict."""
    fields: dict[str, object] = {}
    for name, value in (field for builder in kinds for field in builder.config().items()):
        if fields.setdefault(name, value) != value:
            raise ValueError(f"kinds of layers contradict each other: {name}={fields[name]} and {value}")
    return fields


def _recompute(batch: BatchConfig, kinds: Sequence[Builder]) -> dict[str, object]:
    if batch.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if batch.recompute == "selective":
        modules = filter(None, dict.fromkeys(builder.recomputed for builder in kinds))
        return {"recompute_granularity": "selective", "recompute_modules": [*modules]}
    return {}


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose last stage returns hidden states [tokens, 1, hidden] instead of logits;
    ``output_head.py`` computes log-probs and loss from them. ``document_pack`` returns its layers' argument.
    A rank has one chunk, or one per virtual pipeline stage."""

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """megatron-core's layer inputs, with the RoPE table cut to the pack's longest document."""
        hidden, table, *others = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if table is not None:
            # Transformer Engine's kernel starts a thread block per table row and document, most of them idle:
            # 2.2 million per call for 67,584 rows and 33 documents.
            table = table[: packed_seq_params.max_seqlen_q]
        return hidden, table, *others

    def _postprocess(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Hidden states [tokens, 1, hidden] of the CP rank on every TP rank; backward sums over TP ranks."""
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
        counters: RouterCounters | None = None,
        real_T: Tensor | None = None,
    ) -> DocumentPack:
        """Return the layers' argument for a pack: document bounds, RoPE and routes of this rank. ``counters``
        count router choices in a pass with gradients, for tokens that are 1 in ``real_T``."""
        table = None if self.rotary is None else self.rotary.table(part.position_T)
        routes = self._routes(part, device, counters)
        load = None
        if counters is not None and real_T is not None:
            load = PackLoad(self._routed_here(real_T), counters.load_LC)
        return DocumentPack.of(part.cu_seqlens, part.max_seqlen, device, table, routes, load)

    def _routed_here(self, column: Tensor) -> Tensor:
        """The part of a CP rank's token column routed by this rank: its SP share, if SP is on."""
        if not self.config.sequence_parallel:
            return column
        group = self.pg_collection.tp
        return cast(Tensor, column.chunk(group.size())[group.rank()])

    def _routes(
        self, part: MicroBatch, device: torch.device, counters: RouterCounters | None
    ) -> PackRoutes | None:
        """A pack's routes through this chunk's layers, for the tokens routed by this rank."""
        if part.route_TLK is None:
            return None
        first, count = self.decoder.layers[0].layer_number, len(self.decoder.layers)
        # Copy only this chunk's layers from the host: a stage would otherwise hold all layers of every pack
        # in flight.
        route_TLK = part.route_TLK[:, first - 1 : first - 1 + count].to(device, non_blocking=True)
        same_T = torch.zeros_like(part.mask_T > 0) if counters is None else counters.same_weights(part)
        route_TLK, known_T, same_T = map(self._routed_here, (route_TLK, ~unknown_T(route_TLK), same_T))
        counts = None if counters is None else counters.counts
        return PackRoutes(route_TLK, known_T, same_T, first, part.replays_routes, counts)

    @property
    def output_weight(self) -> Tensor:
        """This rank's shard of the output layer's weight, [vocabulary / TP, hidden]."""
        tied = self.share_embeddings_and_output_weights
        return cast(Tensor, self.shared_embedding_or_output_weight() if tied else self.output_layer.weight)


def build_chunks(
    config: TransformerConfig, shape: ModelShape, max_positions: int, longest: int
) -> list[PolicyModel]:
    """Build the model chunks of this pipeline stage: one, or one per virtual stage; weights are not loaded.
    ``longest``: length of the longest document, at most ``max_positions``."""
    virtual = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    te = device.uses_transformer_engine(config.params_dtype)
    specs = [layer_spec(block, config, te, longest) for block in shape.blocks]
    layers = [specs[block] for block in shape.pattern]
    chunks = [_chunk(config, shape, max_positions, stage, layers) for stage in stages]
    for chunk in chunks:
        if chunk.rotary is None:
            chunk.rotary_pos_emb.get_rotary_seq_len = partial(_rotary_length, longest)
    return chunks


def _rotary_length(longest: int, _context: Any, _decoder: Any, _input: Any, _config: Any, pack: Any) -> int:
    """Length of megatron's RoPE table: the longest possible document, so one table serves all packs. Megatron
    itself makes one per longest document and caches 32 of them: 1.1 GB at 64k tokens. ``PolicyModel`` passes
    the layers only the rows of a pack."""
    return max(longest, int(pack.max_seqlen_q))


def _chunk(
    config: TransformerConfig,
    shape: ModelShape,
    max_positions: int,
    stage: int | None,
    layers: Sequence[ModuleSpec],
) -> PolicyModel:
    first, count = get_transformer_layer_offset(config, stage), get_num_layers_to_build(config, stage)
    alone = stage is None
    fused = device.uses_transformer_engine(config.params_dtype)
    model = PolicyModel(
        config,
        TransformerBlockSubmodules([*layers[first : first + count]], norm_class(fused)),
        vocab_size=shape.vocab,
        max_sequence_length=max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=alone, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=alone, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope" if fused else "none",  # otherwise DocumentAttention applies it
        rotary_percent=shape.attention.rotary_dim / shape.attention.head_dim,
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=shape.rope_scaling or 1.0,
        vp_stage=stage,
    )
    for layer, block in zip(model.decoder.layers, shape.pattern[first : first + count], strict=True):
        for builder in builders(shape.blocks[block].kinds, fused):
            builder.mark(layer)
    if fused:
        _add_gradients_in_float32(model)
    else:
        model.rotary = Rotary(shape.attention.rotary_dim, shape.rope_theta, shape.rope_scaling)
    return model


def _add_gradients_in_float32(model: PolicyModel) -> None:
    """Make weight-gradient matmuls accumulate directly into DDP's float32 buffer (``main_grad``).

    Otherwise each pack's gradients are rounded to bfloat16, written, and added by another kernel. Megatron's
    ``gradient_accumulation_fusion`` sets the same attribute of Transformer Engine's layers, but then builds
    ``output_layer`` only with apex's kernel, which this model never calls (``output_head.py``).
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
