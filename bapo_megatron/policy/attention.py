"""Core attention in plain torch for ``thd`` packs: causal within each document, grouped-query.

Documents of like length go through SDPA as one right-padded batch: under a causal mask no real query sees
the padding behind it, so there is no mask tensor, and SDPA's flash kernels stay available.

Shapes: ``_THD`` [tokens of the pack, heads, head_dim], ``_PHD`` [rows of all batches, heads, head_dim].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

# Documents are computed as one padded batch while that has at most this many times their tokens.
_MAX_PADDING = 1.5


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention in which each document of a pack attends to itself, causally."""

    def __init__(self, config: Any, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__(config=config)
        if config.attention_dropout != 0.0:
            raise ValueError("attention dropout is not supported: log-probs must be reproducible")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        """Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]; [tokens, h*d]."""
        if packed_seq_params is None:
            raise ValueError("this attention takes thd packs only")
        plan = padding_plan(tuple(packed_seq_params.cu_seqlens_q.tolist()), query.device)
        q_PHD, k_PHD, v_PHD = (
            _Pad.apply(x_THD, plan)  # type: ignore[no-untyped-call]
            for x_THD in (query, key, value)
        )
        outputs = [
            self._attend(*(x_PHD[start:end].unflatten(0, (documents, -1)) for x_PHD in (q_PHD, k_PHD, v_PHD)))
            for start, end, documents in plan.batches
        ]
        out_THD: Tensor = _Unpad.apply(torch.cat(outputs), plan)  # type: ignore[no-untyped-call]
        return out_THD.flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One right-padded batch, [documents, length, heads, head_dim], to its rows one after the other."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        gqa = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(0, 1)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Attention has no parameters."""
        return {}


@dataclass(frozen=True)
class PaddingPlan:
    """Where each row of the padded batches comes from, and where each token of the pack went."""

    batches: tuple[tuple[int, int, int], ...]
    """First row, end row and documents of each batch."""
    token_of_row_P: Tensor
    """Token of the pack that a row holds; a padding row repeats its document's last token."""
    real_P: Tensor
    """1 for a token, 0 for padding."""
    row_of_token_T: Tensor
    """Row that holds the token."""


@lru_cache(maxsize=16)  # every layer of a micro-batch asks for the same one
def padding_plan(bounds: tuple[int, ...], device: torch.device) -> PaddingPlan:
    """The plan for a pack with documents ``bounds[d]:bounds[d + 1]``."""
    lengths = [end - start for start, end in pairwise(bounds)]
    batches: list[tuple[int, int, int]] = []
    tokens, real = [], []
    row = 0
    for group in groups_of_like_length(lengths):
        length = torch.tensor([lengths[d] for d in group])[:, None]
        start = torch.tensor([bounds[d] for d in group])[:, None]
        step = torch.arange(int(length.max()))
        tokens.append((start + torch.minimum(step, length - 1)).flatten())
        real.append((step < length).flatten())
        batches.append((row, row + tokens[-1].numel(), len(group)))
        row += tokens[-1].numel()
    token_of_row_P, real_P = torch.cat(tokens), torch.cat(real)
    row_of_token_T = torch.empty(bounds[-1], dtype=torch.int64)
    row_of_token_T[token_of_row_P[real_P]] = torch.arange(row)[real_P]
    return PaddingPlan(
        tuple(batches), token_of_row_P.to(device), real_P.to(device), row_of_token_T.to(device)
    )


def groups_of_like_length(lengths: list[int]) -> list[list[int]]:
    """Indices of non-empty documents in batches whose padding stays within the limit, longest first."""
    groups: list[list[int]] = []
    tokens = longest = 0
    for document in sorted((d for d, n in enumerate(lengths) if n), key=lambda d: -lengths[d]):
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > _MAX_PADDING * (tokens + lengths[document]):
            groups.append([])
            tokens, longest = 0, lengths[document]
        groups[-1].append(document)
        tokens += lengths[document]
    return groups


class _Pad(torch.autograd.Function):
    """Tokens to padded rows. Both directions are gathers: torch's own backward would add row by row."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, plan: PaddingPlan) -> Tensor:
        ctx.plan = plan
        return x_THD.index_select(0, plan.token_of_row_P)

    @staticmethod
    def backward(ctx: Any, grad_PHD: Tensor) -> tuple[Tensor, None]:
        """No output that is kept depends on a padding row, so its gradient is zero and may be left out."""
        return grad_PHD.index_select(0, ctx.plan.row_of_token_T), None


class _Unpad(torch.autograd.Function):
    """Padded rows back to tokens."""

    @staticmethod
    def forward(ctx: Any, x_PHD: Tensor, plan: PaddingPlan) -> Tensor:
        ctx.plan = plan
        return x_PHD.index_select(0, plan.row_of_token_T)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None]:
        grad_PHD = grad_THD.index_select(0, ctx.plan.token_of_row_P)
        return grad_PHD * ctx.plan.real_P[:, None, None], None
