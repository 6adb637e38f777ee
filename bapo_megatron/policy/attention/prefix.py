"""Prefix attention: causal attention of n queries that are the last of m keys, without a mask tensor.

    softmax(scale q k^T) v, where query i sees the keys up to m - n + i
    q [batch, heads, n, head_dim]; k, v [batch, kv_heads, m, head_dim], m >= n

On a CPU two flash calls compute the prefix, which every query sees, and the last n keys, causally; their
outputs are merged by their log-sum-exps (Milakov & Gimelshein 2018, arXiv 1805.02867). With the merged output
and log-sum-exp each part's backward gives its exact share of the gradient, as in ring attention (Liu et al.
2023, arXiv 2310.01889). Where m = n, and on a GPU (float32), it is one SDPA call. For ``padded.py`` (m = n),
and ``core.py`` under context parallelism. Used by ``core.py`` and ``padded.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

# torch's flash kernels for the CPU: the public function does not return the log-sum-exp.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v, where query i of n sees the keys up to ``keys - n + i``."""
    queries, keys = q.size(2), k.size(2)
    if q.is_cuda:
        # Float32 on a GPU: its memory-efficient kernel has no grouped queries. Half precision uses flash.py.
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    if queries == keys:
        gqa = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    if q.is_cuda:
        mask: Any = causal_lower_right(queries, keys)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out: Tensor = _PrefixAttention.apply(q, k, v, scale)  # type: ignore[no-untyped-call]
    return out


class _PrefixAttention(torch.autograd.Function):
    """Prefix attention on a CPU as an autograd function: two flash calls forward, two backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        prefix = k.size(2) - q.size(2)
        seen, seen_lse = _flash(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=scale)
        own, own_lse = _flash(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=scale)
        lse = torch.logaddexp(seen_lse, own_lse)
        out: Tensor = seen * (seen_lse - lse).exp()[..., None] + own * (own_lse - lse).exp()[..., None]
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.prefix, ctx.scale = prefix, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts = (slice(0, ctx.prefix), False), (slice(ctx.prefix, None), True)
        grads = [
            _flash_backward(grad_out, q, k[:, :, keys], v[:, :, keys], out, lse, 0.0, causal, scale=ctx.scale)
            for keys, causal in parts
        ]
        (seen_q, seen_k, seen_v), (own_q, own_k, own_v) = grads
        return seen_q + own_q, torch.cat([seen_k, own_k], 2), torch.cat([seen_v, own_v], 2), None
