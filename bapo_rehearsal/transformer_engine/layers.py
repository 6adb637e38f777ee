"""Torch versions of Transformer Engine's compiled kernels for layers and the optimizer.

GEMM, RMSNorm, rotary position embedding (RoPE), grouped GEMM, permutation by expert; AdamW, norm and scale.
All compute in float32 for all dtypes. RoPE is for packed documents (thd), also under context parallelism. The
permutation replaces the wrappers of triton kernels, whose import needs a GPU. Raises NotImplementedError for
fp8, GELU, overlapped communication, and RoPE that is interleaved or not packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bapo_rehearsal.transformer_engine.extension import (
    KERNELS,
    has_values,
    kernel,
    torch_type,
)

_ADAMW = 1
"""Mode of ``multi_tensor_adam`` with decoupled weight decay."""


@kernel
def generic_gemm(
    a: Tensor,
    transposed_a: bool,
    b: Tensor,
    transposed_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_type: int | None,
    bias: Tensor | None,
    _bias_type: int,
    gelu: bool,
    gelu_input: Tensor | None,
    is_grad: bool,
    _workspace: Tensor,
    _workspace_size: int,
    accumulate: bool,
    _split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Matrix product ``alpha op(b) op(a)``, as cuBLAS sees row-major matrices.

    ``bias`` is added; in a backward pass its gradient, in the product's dtype, is the second element instead.
    ``accumulate`` adds the product to ``out``.
    """
    if quantizer is not None or gelu or comm_overlap is not None:
        raise NotImplementedError("a product in fp8, with GELU or with overlapped communication")
    columns = a.shape[-2] if transposed_a else a.shape[-1]
    rows = (b.shape[-1],) if transposed_b else tuple(b.shape[:-1])
    if out is None:
        kind = b.dtype if out_type is None else torch_type(out_type)
        out = torch.empty(*rows, columns, dtype=kind, device=b.device)
    bias_grad = None
    if bias is not None and is_grad:
        bias_grad = torch.empty(b.shape[-1], dtype=out.dtype, device=b.device)
    if has_values(b):
        flat_a, flat_b = (x.reshape(-1, x.shape[-1]).float() for x in (a, b))
        product = alpha * (flat_b.T if transposed_b else flat_b) @ (flat_a.T if transposed_a else flat_a)
        if bias is not None and not is_grad:
            product += bias.float()
        if accumulate:
            product += out.float().reshape(product.shape)
        out.copy_(product.reshape(out.shape))
        if bias_grad is not None:
            bias_grad.copy_(flat_b.sum(0))
    return out, bias_grad, gelu_input, extra_output


@kernel
def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_type: int,
    _sm_margin: int,
    zero_centered: bool,
) -> list[Tensor | None]:
    """RMSNorm over the last dimension: the result, None for the mean, 1 / RMS of each row in float32."""
    if quantizer is not None:
        raise NotImplementedError("RMSNorm with a result in fp8")
    if out is None:
        out = torch.empty(x.shape, dtype=torch_type(out_type), device=x.device)
    inverse_rms = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    if has_values(x):
        rows = x.float().reshape(-1, x.shape[-1])
        inverse_rms.copy_(torch.rsqrt(rows.square().mean(-1) + eps))
        out.copy_((rows * inverse_rms[:, None] * _gamma(weight, zero_centered)).reshape(x.shape))
    return [out, None, inverse_rms]


@kernel
def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse_rms: Tensor, weight: Tensor, _sm_margin: int, zero_centered: bool
) -> list[Tensor]:
    """Gradients of RMSNorm's input and weight."""
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    if has_values(x):
        rows, grads = (y.float().reshape(-1, x.shape[-1]) for y in (x, grad))
        normed = rows * inverse_rms[:, None]
        grad_weight.copy_((grads * normed).sum(0))
        scaled = grads * _gamma(weight, zero_centered)
        inner = (scaled * normed).mean(-1, keepdim=True)
        grad_x.copy_((inverse_rms[:, None] * (scaled - normed * inner)).reshape(x.shape))
    return [grad_x, grad_weight]


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + (1.0 if zero_centered else 0.0)


@kernel
def fused_rope_forward(
    x: Tensor,
    freqs: Tensor,
    _start_positions: Tensor | None,
    _qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """``x`` [tokens, heads, head_dim] rotated by the angles ``freqs`` [positions, 1, 1, angles].

    ``cu_seqlens`` covers the whole pack.
    """
    return _rotated(x, freqs, interleaved, cu_seqlens, cp_size, cp_rank, 1.0)


@kernel
def fused_rope_backward(grad: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    """Gradient, rotated back. Since 2.20 the start positions precede the format."""
    interleaved, cu_seqlens, cp_size, cp_rank = rest[-4:]
    return _rotated(grad, freqs, interleaved, cu_seqlens, cp_size, cp_rank, -1.0)


def _rotated(
    x: Tensor,
    freqs: Tensor,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    sign: float,
) -> Tensor:
    if interleaved or cu_seqlens is None:
        raise NotImplementedError("RoPE that is interleaved, or for anything but a pack of documents")
    out = torch.empty_like(x)
    if has_values(x):
        positions = positions_of(cu_seqlens, cp_size, cp_rank)
        if positions.numel() != x.shape[0]:
            raise ValueError(f"cu_seqlens give this rank {positions.numel()} tokens, and it has {x.shape[0]}")
        angles = freqs.reshape(freqs.shape[0], -1)[positions].float()[:, None]
        width = angles.shape[-1]
        first, second = x[..., :width].float().chunk(2, -1)
        turned = x[..., :width].float() * angles.cos()
        turned += torch.cat([-second, first], -1) * (sign * angles.sin())
        out[..., :width] = turned
        out[..., width:] = x[..., width:]
    return out


def positions_of(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Document position of each token of a rank: chunks r and 2 x size - 1 - r of each document."""
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        if cp_size == 1:
            parts.append(torch.arange(end - start))
            continue
        chunk = (end - start) // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(number * chunk, (number + 1) * chunk))
    return torch.cat(parts)


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
    """Products ``op(b_i) op(a_i)`` per expert, written to ``out``; returns ``bias``, which is empty. ``out``
    has a tensor per expert, or, with ``single_output``, one tensor with ``splits`` rows per expert."""
    if any(len(tensor) for tensor in bias):
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

    Copies are sorted by expert, then by token. A row has the places of a token's n copies, last first, their
    experts from column ``num_experts`` on, and n in the last column.
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
    """Copies of each token's row of ``x``, and of its routing probabilities, at their places.

    ``sizes``: padding (newer versions), then tokens, experts, copies, hidden size and width of ``scale``. A
    copy with probability 0 is padding: zeros.
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
    """Sum over each token's copies, weighted by ``merging`` [tokens, experts] if present; and the copies'
    ``probs`` as [tokens, experts], zero elsewhere."""
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
    """Gradients of ``unpermute_with_mask_map`` for ``x`` and ``merging``."""
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
    """Place of each row, int32 [rows], after chunks of ``sizes`` rows are laid in ``order``."""
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
    """Rows of ``x`` and their ``probs`` at their places, or, in a backward pass, back from them."""
    out = torch.empty(num_tokens, hidden_size, dtype=x.dtype, device=x.device)
    probs_out = None if probs is None else torch.empty(num_tokens, dtype=probs.dtype, device=x.device)
    if has_values(x):
        for source, target in ((x, out), (probs, probs_out)):
            if source is not None and target is not None:
                if is_forward:
                    target[places.long()] = source
                else:
                    target.copy_(source[places.long()])
    return out, probs_out


PERMUTATION = {
    function.__name__: KERNELS[function.__name__]
    for function in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        unpermute_with_mask_map_bwd_with_merging_probs,
        make_chunk_sort_map,
        sort_chunks_by_map,
    )
}
"""Contents of the module ``transformer_engine.pytorch.triton.permutation``."""


def _copies(places: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Place, token and expert of every copy in ``places``, as three int64 vectors."""
    column = torch.arange(experts, device=places.device)
    token, number = torch.nonzero(column < places[:, -1:], as_tuple=True)
    return places[token, number].long(), token, places[token, experts + number].long()


def _refuse(*unsupported: Tensor | None) -> None:
    if any(value is not None for value in unsupported):
        raise NotImplementedError("a permutation of tokens with fp8 scales or padding")


@kernel
def multi_tensor_adam(
    _chunk_size: int,
    _overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One AdamW step, in place; ``lists``: gradients, parameters, first and second moments."""
    if mode != _ADAMW:
        raise NotImplementedError("Adam whose weight decay is part of the gradient")
    first_scale, second_scale = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, parameter, first, second in zip(*lists[:4], strict=True):
        if not has_values(parameter):
            continue
        first.mul_(beta1).add_(grad.float(), alpha=1 - beta1)
        second.mul_(beta2).add_(grad.float().square(), alpha=1 - beta2)
        change = (first / first_scale) / ((second / second_scale).sqrt() + eps)
        parameter.sub_(lr * (change + weight_decay * parameter))


@kernel
def multi_tensor_l2norm(
    _chunk_size: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """L2 norm of all tensors, [1], and of each tensor (empty unless ``per_tensor``)."""
    tensors = lists[0]
    norm, norms = (
        torch.zeros(size, dtype=torch.float32, device=tensors[0].device)
        for size in (1, len(tensors) if per_tensor else 0)
    )
    if has_values(tensors[0]):
        each = torch.stack([tensor.float().norm() for tensor in tensors])
        norm.copy_(each.norm())
        if per_tensor:
            norms.copy_(each)
    return norm, norms


@kernel
def multi_tensor_scale(
    _chunk_size: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float | Tensor
) -> None:
    """Write each tensor of the first list times ``scale`` to its counterpart in the second."""
    for source, target in zip(*lists, strict=True):
        if has_values(source):
            target.copy_(source * scale)
