"""Operators of hybrid models in plain torch, for SGLang on a CPU: Gated DeltaNet, gated attention.

Three functions, and seven operators registered under ``torch.ops.sgl_kernel``, as SGLang 0.5.23 calls them
for ``srt/models/qwen3_5.py``. Each request has a state slot in the server: the convolution's last inputs
[slots, channels, width - 1], and the recurrent state [slots, H, V, K] (H value heads, K and V the key and
value sizes); the functions update both in place. The delta rule runs token by token, fit for toy models:

    S <- exp(g) S;  S <- S + beta (v - S k) k^T;  o = S q / sqrt(K)

with q and k of unit length (Yang et al., Gated Delta Networks, 2024, Eq. 10).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_LIBRARY = torch.library.Library("sgl_kernel", "DEF")


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_other: Any,
) -> Tensor:
    """Convolve a prefill, [channels, tokens], sequence by sequence; store each sequence's last inputs."""
    outputs = []
    bounds = query_start_loc.tolist()
    kept = conv_states.shape[-1]
    for slot, goes_on, start, end in zip(
        cache_indices.tolist(), has_initial_state.tolist(), bounds, bounds[1:], strict=False
    ):
        before = conv_states[slot].to(x.dtype) if goes_on else x.new_zeros(len(x), kept)
        whole = torch.cat([before, x[:, start:end]], dim=1)
        conv_states[slot] = whole[:, -kept:].to(conv_states.dtype)
        outputs.append(_convolved(whole[None], weight, bias, activation)[0])
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve one new token of each request, [requests, channels]; update the stored inputs."""
    slots = conv_state_indices.long()
    whole = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_states[slots] = whole[:, :, 1:].to(conv_states.dtype)
    return _convolved(whole, weight, bias, activation)[:, :, 0]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor, None]:
    """Apply the delta rule to a prefill, [1, tokens, heads, size]; store the sequences' states."""
    assert not head_first
    assert use_qk_l2norm_in_kernel
    out = _delta_rule(q[0], k[0], v[0], g[0], beta[0], initial_state, initial_state_indices, cu_seqlens)
    return out[None], initial_state, None


def _decode(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Apply the gated delta rule to one new token of each request, [1, requests, heads, size]."""
    g, beta = _gates(A_log, a, b, dt_bias)
    states, slots = initial_state_source, initial_state_indices
    return _delta_rule(q[0], k[0], v[0], g[0], beta[0], states, slots, cu_seqlens)[None]


def _gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return log decay ``-exp(A_log) softplus(a + dt_bias)`` and beta ``sigmoid(b)``, [1, tokens, heads]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], torch.sigmoid(b)[None]


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    repeats = v.shape[1] // q.shape[1]
    q, k = (_unit(tensor.float()).repeat_interleave(repeats, dim=1) for tensor in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay, rate, value = g.float().exp()[..., None, None], beta.float()[..., None], v.float()
    out = torch.empty_like(value)
    bounds = cu_seqlens.tolist()
    for slot, start, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        state = states[slot].float()
        for t in range(start, end):
            state = state * decay[t]
            wrong = value[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("hv,hk->hvk", rate[t] * wrong, k[t])
            out[t] = torch.einsum("hvk,hk->hv", state, q[t])
        states[slot] = state.to(states.dtype)
    return out.to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _convolved(whole: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    assert activation in (None, "silu", "swish")
    out = F.conv1d(whole, weight[:, None].to(whole.dtype), bias, groups=len(weight))
    return F.silu(out) if activation else out


def _sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    x.mul_(torch.sigmoid(gate.reshape(x.shape)))


def _normed(x: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    """RMSNorm of each head with weight ``1 + w``, [rows of heads, size]."""
    heads = x.reshape(-1, head_dim).float()
    heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    return (heads * (1 + weight.float())).to(x.dtype)


def _gated_norm(x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row times ``silu(z)``, for the delta rule's output."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float() * F.silu(z.float())).to(x.dtype)


def _qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    return _normed(q, q_weight, eps, head_dim), _normed(k, k_weight, eps, head_dim)


def _qk_norm_with_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize query and key; in ``q_gate`` each head's query precedes its gate."""
    q, gate = q_gate.reshape(-1, heads, 2 * head_dim).chunk(2, dim=-1)
    return *_qk_norm(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def _split_projections(
    qkvz: Tensor, ba: Tensor, k_heads: int, v_heads: int, k_size: int, v_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split two projections into fused q, k and v; z; b; a."""
    qkv, z = qkvz.split([2 * k_heads * k_size + v_heads * v_size, v_heads * v_size], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, v_heads, v_size).contiguous(), b.contiguous(), a.contiguous()


for _schema, _function in (
    ("fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor z, float eps) -> Tensor", _gated_norm),
    ("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()", _sigmoid_mul),
    (
        "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, "
        "int head_dim) -> (Tensor, Tensor)",
        _qk_norm,
    ),
    (
        "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, "
        "float eps, int head_dim, int heads) -> (Tensor, Tensor, Tensor)",
        _qk_norm_with_gate,
    ),
    (
        "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int k_heads, int v_heads, "
        "int k_size, int v_size) -> (Tensor, Tensor, Tensor, Tensor)",
        _split_projections,
    ),
    ("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)", _gates),
    (
        "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, "
        "Tensor v, Tensor a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, "
        "Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) "
        "-> Tensor",
        _decode,
    ),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
