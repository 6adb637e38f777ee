"""Padded attention: a pack's documents through SDPA in right-padded batches, causal, GQA.

Called by ``core.py`` in every layer on a CPU, and in float32 on a GPU, without context parallelism. A batch
has documents of similar length. Under a causal mask no real query sees the padding behind it, so no mask
tensor is needed, and SDPA can use its fast kernels.

Shapes: ``_THD`` [tokens of the pack, heads, head_dim], ``_PHD`` [rows of all batches, heads, head_dim]. Used
by ``core.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.policy.attention.prefix import prefix_attention

# Padding limit: a padded batch has at most this many times the tokens of its documents.
_MAX_PADDING = 1.5


def padded_attention(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, bounds: tuple[int, ...], scale: float
) -> Tensor:
    """Causal attention [tokens, heads, head_dim] within each document ``bounds[d]:bounds[d + 1]``."""
    plan = padding_plan(bounds, query_THD.device)
    q_PHD, k_PHD, v_PHD = (
        _Pad.apply(x_THD, plan)  # type: ignore[no-untyped-call]
        for x_THD in (query_THD, key_THD, value_THD)
    )
    outputs = [
        _attend([x_PHD[start:end].unflatten(0, (documents, -1)) for x_PHD in (q_PHD, k_PHD, v_PHD)], scale)
        for start, end, documents in plan.batches
    ]
    out_THD: Tensor = _Unpad.apply(torch.cat(outputs), plan)  # type: ignore[no-untyped-call]
    return out_THD


def _attend(inputs: list[Tensor], scale: float) -> Tensor:
    """Attention of a right-padded batch: q, k, v [documents, length, heads, head_dim] to [rows, heads, d]."""
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return prefix_attention(q, k, v, scale).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class PaddingPlan:
    """The index maps between a pack's tokens and the rows of its padded batches, cached for all layers.

    Made by ``padding_plan``, read by ``padded_attention`` in every layer.
    """

    batches: tuple[tuple[int, int, int], ...]
    """First row, end row and number of documents of each batch."""
    token_of_row_P: Tensor
    """Index of a row's token in the pack; a padding row repeats its document's last token."""
    real_P: Tensor
    """1 for a token, 0 for padding."""
    row_of_token_T: Tensor
    """Index of a token's row."""


@lru_cache(maxsize=16)  # every layer of a micro-batch needs the same plan
def padding_plan(bounds: tuple[int, ...], device: torch.device) -> PaddingPlan:
    """The padding plan of a pack with documents ``bounds[d]:bounds[d + 1]``."""
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
    maps = (x.to(device, non_blocking=True) for x in (token_of_row_P, real_P, row_of_token_T))
    return PaddingPlan(tuple(batches), *maps)


def groups_of_like_length(lengths: list[int]) -> list[list[int]]:
    """Batches of non-empty documents, by index, longest first, with padding within ``_MAX_PADDING``."""
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
    """Pad: tokens to padded rows. A gather both ways: torch's own backward would scatter-add rows."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, plan: PaddingPlan) -> Tensor:
        ctx.plan = plan
        return x_THD.index_select(0, plan.token_of_row_P)

    @staticmethod
    def backward(ctx: Any, grad_PHD: Tensor) -> tuple[Tensor, None]:
        """The gradient of the tokens' rows. That of padding rows is zero: no kept output depends on them."""
        return grad_PHD.index_select(0, ctx.plan.row_of_token_T), None


class _Unpad(torch.autograd.Function):
    """Unpad: padded rows to tokens."""

    @staticmethod
    def forward(ctx: Any, x_PHD: Tensor, plan: PaddingPlan) -> Tensor:
        ctx.plan = plan
        return x_PHD.index_select(0, plan.row_of_token_T)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None]:
        grad_PHD = grad_THD.index_select(0, ctx.plan.token_of_row_P)
        return grad_PHD * ctx.plan.real_P[:, None, None], None
