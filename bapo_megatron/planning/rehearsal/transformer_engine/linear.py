"""Kernels of dense layers in torch: GEMM, RMSNorm and rotary position embedding.

Float32 inside, whatever the types in and out. RoPE is for packed documents (thd), also under context
parallelism. NotImplementedError for fp8, GELU, overlapped communication, interleaved RoPE, and RoPE of
anything but packs of documents. Used by ``installation.py``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.planning.rehearsal.transformer_engine.kernel import has_values, kernel, torch_type


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
    """The matrix product ``alpha op(b) op(a)``, as cuBLAS sees row-major matrices.

    ``bias`` is added; in a backward pass its gradient is returned as the second element instead.
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
        bias_grad = torch.empty(b.shape[-1], dtype=bias.dtype, device=b.device)
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
    """RMSNorm over the last dimension: the result, no mean, and 1 / RMS of each row in float32."""
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
    """Gradients of RMSNorm for its input and its weight."""
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

    ``cu_seqlens`` are those of the whole pack.
    """
    return _rotated(x, freqs, interleaved, cu_seqlens, cp_size, cp_rank, 1.0)


@kernel
def fused_rope_backward(grad: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    """The gradient, rotated back. Since 2.20 the start positions come before the format."""
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
    """The position in its document of each token that a rank holds: chunks r and 2 x size - 1 - r of each."""
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        if cp_size == 1:
            parts.append(torch.arange(end - start))
            continue
        chunk = (end - start) // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(number * chunk, (number + 1) * chunk))
    return torch.cat(parts)
