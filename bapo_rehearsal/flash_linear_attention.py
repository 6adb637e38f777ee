"""Stand-in for flash-linear-attention (fla) kernels, which compute Gated DeltaNet on a GPU.

The stand-in does no arithmetic. It allocates, keeps and releases memory in the order of the fla-core 0.6.0
launchers on a Hopper GPU (``modules/causal_conv1d/ops.py``, ``ops/gated_delta_rule/chunk.py`` and their
callees). The forward pass does not keep chunk states: the backward pass recomputes them.

Shapes: [1, tokens, heads, width]. Chunks have ``CHUNK`` tokens; the last one of a document may have fewer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.layers.delta_net import CHUNK, DeltaNet
from bapo_megatron.policy import delta_net
from bapo_rehearsal.transformer_engine.extension import observers

FORWARD, BACKWARD = "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"
"""Kernel names of the rule's passes, reported to observers with queries, keys and values."""


def install() -> None:
    """Replace the policy's ``kernel_rule`` with the stand-in, in this process."""
    delta_net.kernel_rule = kernel_rule


def kernel_rule(
    qkv_TD: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    weight: Tensor,
    kind: DeltaNet,
    bounds: tuple[int, ...],
) -> Tensor:
    """Stand-in for ``policy.delta_net.kernel_rule``: convolution, SiLU and the rule within each document."""
    chunks = sum(-(-(end - start) // CHUNK) for start, end in pairwise(bounds))
    mixed = _Convolution.apply(qkv_TD[None], weight[:, 0], chunks)  # type: ignore[no-untyped-call]
    q, k, v = delta_net._heads(mixed, kind)
    out: Tensor = _Rule.apply(q, k, v, decay_TH[None], beta_TH[None], chunks)  # type: ignore[no-untyped-call]
    return out[0].flatten(1)


def rule_flops(name: str, query: Tensor, value: Tensor) -> int:
    """FLOPs of the matrix products in one pass of the rule.

    Forward, per value head and token: 64 (6 k + 4 v) within the chunk, and 6 k v with the state. Backward: 64
    (16 k + 10 v) and 16 k v, which include recomputed states.
    """
    k, (*rows, v) = query.size(-1), value.shape
    within, state = (6 * k + 4 * v, 6 * k * v) if name == FORWARD else (16 * k + 10 * v, 16 * k * v)
    return torch.Size(rows).numel() * (CHUNK * within + state)


class _Convolution(torch.autograd.Function):
    """Causal convolution of [1, tokens, channels] with [channels, kernel], then SiLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        before_silu, dx = x.new_empty(x.shape), x.new_empty(x.shape)
        dw = weight.new_empty(ctx.chunks, *weight.shape, dtype=torch.float32).sum(0).to(weight)
        del before_silu
        return dx, dw, None


class _Rule(torch.autograd.Function):
    """Gated delta rule with queries and keys of L2 norm 1, from S = 0; the output has the values' shape."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: int) -> Tensor:
        _report(FORWARD, q, k, v)
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        unit = [(torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)) for x in (q, k)]
        sums, inverse = torch.empty_like(g), k.new_empty(*v.shape[:-1], CHUNK)
        w, u = k.new_empty(*v.shape[:-1], k.size(-1)), torch.empty_like(v)
        states, v_new = _states(k, v, chunks), torch.empty_like(v)
        out = torch.empty_like(v)
        ctx.save_for_backward(*unit[0], *unit[1], v, sums, beta, inverse)
        ctx.chunks = chunks
        del w, u, states, v_new
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, _, k, _, v, sums, beta, _ = ctx.saved_tensors
        _report(BACKWARD, q, k, v)
        dq, dk, *others = _gradients(q, k, v, sums, beta, grad.contiguous(), ctx.chunks)
        # Gradients of the queries and keys before normalization.
        dq, dk = torch.empty_like(dq), torch.empty_like(dk)
        return dq, dk, *others, None


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor, grad: Tensor, chunks: int
) -> tuple[Tensor, ...]:
    """Gradients of the rule's inputs. Named buffers stay allocated until it returns, as in fla."""
    wide = (*v.shape[:-1], k.size(-1))
    w, u = k.new_empty(wide), torch.empty_like(v)
    states, v_new = _states(k, v, chunks), torch.empty_like(u)
    dv = torch.empty_like(grad)
    d_states = _states(k, v, chunks)
    dv = torch.empty_like(dv)
    dq, dk, dg, dw = k.new_empty(wide), k.new_empty(wide), torch.empty_like(sums), torch.empty_like(w)
    dq, dk = _over_shared(dq, q), _over_shared(dk, k)
    dk_again, dv, dg_again = k.new_empty(wide), torch.empty_like(dv), torch.empty_like(dg)
    db = torch.empty_like(beta)
    dk.add_(_over_shared(dk_again, k))
    dg.add_(dg_again)
    del w, u, states, v_new, d_states, dw
    return dq, dk, dv, torch.empty_like(dg), db


def _over_shared(grad: Tensor, like: Tensor) -> Tensor:
    """Gradients per value head, summed over the value heads that share a key head."""
    if grad.shape == like.shape:
        return grad
    summed: Tensor = grad.unflatten(2, (like.size(2), -1)).sum(3)
    return summed


def _states(k: Tensor, v: Tensor, chunks: int) -> Tensor:
    """State at the start of each chunk, for every value head."""
    return k.new_empty(1, chunks, v.size(2), k.size(-1), v.size(-1))


def _report(name: str, *arguments: Tensor) -> None:
    for observe in observers:
        observe(name, arguments, {})
