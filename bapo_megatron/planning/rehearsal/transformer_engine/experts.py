"""Kernels of expert layers in torch: the grouped GEMM, and the permutation of tokens by expert; no fp8.

The grouped GEMM is of the compiled part. The permutation is of Transformer Engine's triton kernels, whose
wrappers are replaced: they need a GPU to be imported at all. Used by ``installation.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.planning.rehearsal.transformer_engine.kernel import KERNELS, has_values, kernel


@kernel
def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transposed_a: bool,
    b: Sequence[Tensor],
    transposed_b: bool,
    out: Sequence[Tensor],
    _out_type: int,
    splits: Sequence[int] | None,
    bias: Sequence[Tensor],
    _bias_type: int,
    single_output: bool,
    _gelu_input: Sequence[Tensor],
    is_grad: bool,
    _workspace: Any,
    _workspace_size: int,
    accumulate: bool,
    *_accumulator_and_sm_count: Any,
) -> Sequence[Tensor]:
    """The products ``op(b_i) op(a_i)`` of each expert, into ``out``: one tensor with a part for each of
    ``splits`` rows if ``single_output``, else one tensor each. Returns ``bias``, which is empty."""
    if any(len(one) for one in bias):
        raise NotImplementedError("a grouped product with a bias")
    if single_output and splits is None:
        raise ValueError("a grouped product into one tensor needs the rows of each part")
    if has_values(out[0]):
        parts = out[0].split(list(splits or ())) if single_output else out
        for left, right, target in zip(b, a, parts, strict=True):
            flat_b, flat_a = left.float(), right.float()
            product = (flat_b.T if transposed_b else flat_b) @ (flat_a.T if transposed_a else flat_a)
            target.copy_(product + target.float() if accumulate else product)
    return bias


@kernel
def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Places of each token's copies, int32 [tokens, 2 experts + 1].

    Copies are sorted by expert, then by token. A row holds the places of a token's n copies, last first,
    their experts from column ``num_experts`` on, and n in the last column.
    """
    places = torch.empty(num_tokens, 2 * num_experts + 1, dtype=torch.int32, device=routing_map.device)
    if has_values(routing_map):
        chosen = routing_map.bool()
        rows = chosen.T.flatten().cumsum(0).view(num_experts, num_tokens).T - 1
        last_first, experts = rows.masked_fill(~chosen, -1).sort(dim=1, descending=True)
        places[:, :num_experts] = last_first
        places[:, num_experts:-1] = experts
        places[:, -1] = chosen.sum(1)
    return places


@kernel
def permute_with_mask_map(
    x: Tensor, places: Tensor, probs: Tensor | None, scale: Tensor | None, *sizes: Any
) -> tuple[Tensor, None, Tensor | None]:
    """The copies of each token's row of ``x`` at their places, and of its probability for their expert.

    ``sizes``: newer versions' padding, then tokens, experts, copies, hidden size and that of ``scale``. A
    copy of probability 0 is padding: zeros.
    """
    *padding, _tokens, experts, copies, hidden, _scale = sizes
    _refuse(scale, *padding)
    out = torch.empty(copies, hidden, dtype=x.dtype, device=x.device)
    own = None if probs is None else torch.empty(copies, dtype=probs.dtype, device=x.device)
    if has_values(x):
        row, token, expert = _copies(places, experts)
        out[row] = x[token]
        if own is not None and probs is not None:
            own[row] = probs[token, expert]
            out[own == 0] = 0
    return out, None, own


@kernel
def unpermute_with_mask_map(
    x: Tensor, places: Tensor, merging: Tensor | None, probs: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor | None]:
    """The sum over each token's copies, times ``merging`` [tokens, experts] where given; and ``probs`` of the
    copies as [tokens, experts], zero elsewhere."""
    *padding, tokens, experts, hidden = sizes
    _refuse(*padding)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    spread = None if probs is None else torch.empty(tokens, experts, dtype=probs.dtype, device=x.device)
    if has_values(x):
        row, token, expert = _copies(places, experts)
        rows = x[row].float()
        if merging is not None:
            rows = rows * merging[token, expert].float()[:, None]
        out.copy_(torch.zeros(tokens, hidden, device=x.device).index_add_(0, token, rows))
        if spread is not None and probs is not None:
            spread.zero_()[token, expert] = probs[row]
    return out, spread


@kernel
def unpermute_with_mask_map_bwd_with_merging_probs(
    grad: Tensor, places: Tensor, x: Tensor, merging: Tensor, *sizes: Any
) -> tuple[Tensor, Tensor]:
    """Gradients of ``unpermute_with_mask_map`` for its rows ``x`` and for ``merging``."""
    *padding, tokens, experts, copies, hidden = sizes
    _refuse(*padding)
    grad_x = torch.empty(copies, hidden, dtype=grad.dtype, device=grad.device)
    grad_merging = torch.empty(tokens, experts, dtype=merging.dtype, device=grad.device)
    if has_values(grad):
        row, token, expert = _copies(places, experts)
        rows = grad[token].float()
        grad_x[row] = (rows * merging[token, expert].float()[:, None]).to(grad_x.dtype)
        grad_merging.zero_()[token, expert] = (rows * x[row].float()).sum(1).to(merging.dtype)
    return grad_x, grad_merging


@kernel
def make_chunk_sort_map(sizes: Tensor, order: Tensor, num_tokens: int, _num_splits: int) -> Tensor:
    """The place of each row, int32 [rows], when chunks of ``sizes`` rows are laid in ``order``."""
    places = torch.empty(num_tokens, dtype=torch.int32, device=sizes.device)
    if has_values(sizes):
        chunks = torch.arange(num_tokens).split(sizes.tolist())
        rows = torch.cat([chunks[int(number)] for number in order.tolist()])
        places[rows] = torch.arange(num_tokens, dtype=torch.int32)
    return places


@kernel
def sort_chunks_by_map(
    x: Tensor, places: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """The rows of ``x`` and their ``probs`` at their places, or in a backward pass back from them."""
    out = torch.empty(num_tokens, hidden_size, dtype=x.dtype, device=x.device)
    moved = None if probs is None else torch.empty(num_tokens, dtype=probs.dtype, device=x.device)
    if has_values(x):
        for source, target in ((x, out), (probs, moved)):
            if source is not None and target is not None:
                if is_forward:
                    target[places.long()] = source
                else:
                    target.copy_(source[places.long()])
    return out, moved


PERMUTATION = {
    one.__name__: KERNELS[one.__name__]
    for one in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        unpermute_with_mask_map_bwd_with_merging_probs,
        make_chunk_sort_map,
        sort_chunks_by_map,
    )
}
"""What the module ``transformer_engine.pytorch.triton.permutation`` has."""


def _copies(places: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Place, token and expert of every copy in ``places``, as three int64 vectors."""
    column = torch.arange(experts, device=places.device)
    token, number = torch.nonzero(column < places[:, -1:], as_tuple=True)
    return places[token, number].long(), token, places[token, experts + number].long()


def _refuse(*unsupported: Tensor | None) -> None:
    if any(one is not None for one in unsupported):
        raise NotImplementedError("a permutation of tokens with fp8 scales or padding")
