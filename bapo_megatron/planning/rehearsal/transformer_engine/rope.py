"""Rotary position embedding kernels in torch, for packed documents (thd), also under context parallelism.

NotImplementedError for interleaved RoPE, and for inputs that are no packs of documents. Used by
``installation.py``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.planning.rehearsal.transformer_engine.kernel import has_values, kernel


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
