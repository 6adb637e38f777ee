"""The core attention module in torch for ``thd`` packs: causal within each document (block-diagonal).

Context parallelism: an all-gather of keys and values over the CP ranks (small, with grouped-query heads);
each rank's queries attend to the part of their document up to them. No mask tensor exists. Half precision on
a GPU uses ``flash.py``; else whole documents use padded batches (``padded.py``), and chunks ``prefix.py``.
``policy/model.py`` puts ``DocumentAttention`` into the layer spec.

Shapes: ``_THD`` [tokens of the pack, heads, head_dim], ``_LHD`` the same for the tokens on this rank,
``_LKHD`` with keys and values in a dimension of 2. Used by ``policy/model.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from bapo_megatron.policy.attention.context_parallel import document_chunks, gathered_rows
from bapo_megatron.policy.attention.flash import flash_attention
from bapo_megatron.policy.attention.padded import padded_attention
from bapo_megatron.policy.attention.prefix import prefix_attention
from bapo_megatron.policy.attention.rope import RotaryTable, rotate
from bapo_megatron.policy.expert_load import PackLoad
from bapo_megatron.policy.route_replay import PackRoutes


@dataclass
class DocumentPack(PackedSeqParams):  # type: ignore[misc]
    """The sequence parameters of a pack: megatron-core's, with document bounds on the host, RoPE and routes.

    Made by ``PolicyModel.document_pack`` for each pass over a pack; every layer reads it.
    """

    bounds: tuple[int, ...] = ()
    """``cu_seqlens`` on the host: reading it from a GPU would synchronize in every layer."""
    pad_between_seqs: bool = False
    """Whether there is padding between documents; a document's own padding is part of it."""
    rotary: RotaryTable | None = None
    """RoPE of this rank's tokens; None if queries and keys are rotated already."""
    routes: PackRoutes | None = None
    """The experts that the engine sent this rank's tokens to; None: unknown, or not looked at."""
    load: PackLoad | None = None
    """Where the layers count tokens by expert; None: nowhere."""

    @classmethod
    def of(
        cls,
        bounds: tuple[int, ...],
        longest: int,
        device: torch.device,
        rotary: RotaryTable | None = None,
        routes: PackRoutes | None = None,
        load: PackLoad | None = None,
    ) -> DocumentPack:
        """The parameters of a pack: documents ``bounds[d]:bounds[d + 1]`` of at most ``longest`` tokens."""
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            bounds=bounds,
            rotary=rotary,
            routes=routes,
            load=load,
        )


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """The core attention module: RoPE, then dot-product attention, causal within each document of a pack.

    megatron-core makes one for each layer. Under context parallelism ``forward`` is collective over the CP
    ranks. ValueError for an input that is no pack, or dropout.
    """

    def __init__(
        self,
        config: Any,
        *_args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout != 0.0:
            raise ValueError("attention dropout is not supported: log-probs must be reproducible")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.size, self.group = config.context_parallel_size, None
        if self.size > 1:
            self.group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: DocumentPack | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        """Attention of this CP rank's tokens, [tokens, heads * head_dim].

        query [tokens, heads, head_dim]; key, value [tokens, kv_heads, head_dim]; ``packed_seq_params``: of
        the whole pack.
        """
        if packed_seq_params is None:
            raise ValueError("this attention takes thd packs only")
        bounds = packed_seq_params.bounds
        if packed_seq_params.rotary is not None:
            query, key = (rotate(x_LHD, packed_seq_params.rotary) for x_LHD in (query, key))
        rank = 0
        if self.group is not None:
            rank = self.group.rank()
            key, value = self._whole(torch.stack([key, value], 1), bounds).unbind(1)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return flash_attention(query, key, value, bounds, self.size, rank, self.scale).flatten(1)
        if self.size == 1:
            return padded_attention(query, key, value, bounds, self.scale).flatten(1)
        return _by_segment(query, key, value, bounds, self.size, rank, self.scale).flatten(1)

    def _whole(self, x_LKHD: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """All-gather the pack's rows over the CP ranks, in the pack's order; backward: a reduce-scatter."""
        gathered = gather_from_sequence_parallel_region(
            x_LKHD, tensor_parallel_output_grad=True, group=self.group
        )
        rows = _rows_on(bounds, self.size, gathered.device)
        whole: Tensor = _Reorder.apply(gathered, rows)  # type: ignore[no-untyped-call]
        return whole

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """An empty state: attention has no parameters."""
        return {}


def _by_segment(
    query_LHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    bounds: tuple[int, ...],
    size: int,
    rank: int,
    scale: float,
) -> Tensor:
    """Attention [tokens, heads, head_dim], chunk by chunk."""
    parts = [s for s in document_chunks(bounds, size, rank) if s.queries]
    outputs = []
    for part, q_LHD in zip(parts, query_LHD.split([part.queries for part in parts]), strict=True):
        k_THD, v_THD = (x_THD[part.first_key : part.last_key] for x_THD in (key_THD, value_THD))
        q, k, v = (x[None].transpose(1, 2) for x in (q_LHD, k_THD, v_THD))
        outputs.append(prefix_attention(q, k, v, scale).transpose(1, 2)[0])
    return torch.cat(outputs)


@lru_cache(maxsize=16)  # every layer of a micro-batch needs the same ones
def _rows_on(bounds: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    return gathered_rows(bounds, size).to(device, non_blocking=True)


class _Reorder(torch.autograd.Function):
    """A permutation of rows, a gather in both directions: torch's own backward would scatter-add rows."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, row_T: Tensor) -> Tensor:
        ctx.save_for_backward(row_T)
        return x_THD.index_select(0, row_T)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None]:
        (row_T,) = ctx.saved_tensors
        back_T = torch.empty_like(row_T).scatter_(0, row_T, torch.arange(row_T.numel(), device=row_T.device))
        return grad_THD.index_select(0, back_T), None
