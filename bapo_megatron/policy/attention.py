"""Core attention in plain torch for ``thd`` packs: each document attends to itself, causally.

Under context parallelism keys and values are gathered over the CP ranks (they are small: grouped-query heads)
and each rank's queries attend to the part of their document that lies before them. There is no mask tensor.
Half precision on a GPU goes through torch's variable-length flash kernel in one call; elsewhere whole
documents go in padded batches (``padded_attention.py``) and chunks one by one (``prefix_attention.py``).

Shapes: ``_THD`` [tokens of the pack, heads, head_dim], ``_LHD`` the same for the tokens on this rank.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bapo_megatron.policy.padded_attention import padded_attention
from bapo_megatron.policy.prefix_attention import prefix_attention
from bapo_megatron.policy.zigzag import gathered_rows, segments


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention in which each document of a pack attends to itself, causally."""

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
        packed_seq_params: PackedSeqParams | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        """Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]; [tokens, h*d].

        ``tokens`` are those of this CP rank; ``packed_seq_params`` describes the whole pack.
        """
        if packed_seq_params is None:
            raise ValueError("this attention takes thd packs only")
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        rank = 0
        if self.group is not None:
            rank = self.group.rank()
            key, value = self._whole(torch.stack([key, value], 1), bounds).unbind(1)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return _variable_length(query, key, value, bounds, self.size, rank, self.scale).flatten(1)
        if self.size == 1:
            return padded_attention(query, key, value, bounds, self.scale).flatten(1)
        return _by_segment(query, key, value, bounds, self.size, rank, self.scale).flatten(1)

    def _whole(self, x_LKHD: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """The pack's rows in order, from every CP rank; gradients go back to the rank that holds the row."""
        gathered = gather_from_sequence_parallel_region(
            x_LKHD, tensor_parallel_output_grad=True, group=self.group
        )
        rows = gathered_rows(bounds, self.size).to(gathered.device)
        whole: Tensor = _Reorder.apply(gathered, rows)  # type: ignore[no-untyped-call]
        return whole

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Attention has no parameters."""
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
    """Chunk by chunk, [tokens, heads, head_dim]."""
    parts = [s for s in segments(bounds, size, rank) if s.queries]
    outputs = []
    for part, q_LHD in zip(parts, query_LHD.split([part.queries for part in parts]), strict=True):
        k_THD, v_THD = (x_THD[part.first_key : part.last_key] for x_THD in (key_THD, value_THD))
        q, k, v = (x[None].transpose(1, 2) for x in (q_LHD, k_THD, v_THD))
        outputs.append(prefix_attention(q, k, v, scale).transpose(1, 2)[0])
    return torch.cat(outputs)


def _variable_length(
    query_LHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    bounds: tuple[int, ...],
    size: int,
    rank: int,
    scale: float,
) -> Tensor:
    """All chunks in one call of the flash kernel, whose causal mask ends at the last query and key."""
    plan = _key_plan(bounds, size, rank, query_LHD.device)
    if size > 1:  # two chunks of a document see overlapping keys: (2 x size + 1) chunks instead of 2 x size
        key_THD, value_THD = key_THD[plan.key_rows], value_THD[plan.key_rows]
    out = varlen_attn(
        query_LHD,
        key_THD,
        value_THD,
        plan.query_bounds,
        plan.key_bounds,
        plan.most_queries,
        plan.most_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query_LHD.size(1) != key_THD.size(1),
    )
    return cast(Tensor, out)


class _KeyPlan:
    """What the flash kernel wants to know of a rank's chunks."""

    def __init__(self, bounds: tuple[int, ...], size: int, rank: int, device: torch.device) -> None:
        parts = [s for s in segments(bounds, size, rank) if s.queries]
        keys = [part.last_key - part.first_key for part in parts]
        queries = [part.queries for part in parts]
        rows = torch.cat([torch.arange(part.first_key, part.last_key) for part in parts])
        self.key_rows = rows.to(device)
        self.query_bounds = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
        self.key_bounds = torch.tensor([0, *accumulate(keys)], dtype=torch.int32, device=device)
        self.most_queries, self.most_keys = max(queries), max(keys)


@lru_cache(maxsize=16)  # every layer of a micro-batch asks for the same one
def _key_plan(bounds: tuple[int, ...], size: int, rank: int, device: torch.device) -> _KeyPlan:
    return _KeyPlan(bounds, size, rank, device)


class _Reorder(torch.autograd.Function):
    """Rows in another order, each once. Gathers both ways: torch's own backward would add row by row."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, row_T: Tensor) -> Tensor:
        ctx.save_for_backward(row_T)
        return x_THD.index_select(0, row_T)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None]:
        (row_T,) = ctx.saved_tensors
        back_T = torch.empty_like(row_T).scatter_(0, row_T, torch.arange(row_T.numel(), device=row_T.device))
        return grad_THD.index_select(0, back_T), None
