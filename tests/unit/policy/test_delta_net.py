"""The rule of Gated DeltaNet against a recurrence token by token: whole, in packs, beside other documents."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from bapo_megatron.layers.delta_net import DeltaNet
from bapo_megatron.policy.delta_net import chunked_rule, gated_delta_rule
from bapo_megatron.policy.layers import RMSNorm

KIND = DeltaNet(key_heads=2, value_heads=4, key_dim=6, value_dim=5, kernel=4)
CHANNELS = 2 * KIND.keys + KIND.values
BOUNDS = (0, 1, 8, 72, 145, 285, 288)


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Of one document: [tokens, heads, width]."""
    shared = v.size(1) // k.size(1)
    q, k = (x.repeat_interleave(shared, 1) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = v.new_zeros(v.size(1), k.size(2), v.size(2))
    outputs = []
    for t in range(len(v)):
        state = state * g[t, :, None, None].exp()
        wanted = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], wanted)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.size(2) ** -0.5)
    return torch.stack(outputs)


def inputs(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """Channels before the convolution, g, beta, and the convolution's weight, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x, g, beta = (torch.randn(tokens, n, generator=generator).double() for n in (CHANNELS, 4, 4))
    weight = torch.randn(CHANNELS, 1, KIND.kernel, generator=generator).double()
    return [x, -F.softplus(g), beta.sigmoid(), weight]


def alone(x: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One document by the recurrence, its convolution term by term."""
    taps = [F.pad(x, (0, 0, back, 0))[: len(x)] * weight[:, 0, -1 - back] for back in range(KIND.kernel)]
    q, k, v = F.silu(sum(taps)).split([KIND.keys, KIND.keys, KIND.values], -1)
    heads = [part.unflatten(-1, (-1, width)) for part, width in ((q, 6), (k, 6), (v, 5))]
    return recurrence(*heads, g, beta).flatten(1)


def test_float32_is_as_exact_as_transformers() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    x, g, beta, _ = inputs(200)
    q, k, v = x.split([KIND.keys, KIND.keys, KIND.values], -1)
    wide = [part.unflatten(-1, (-1, width)) for part, width in ((q, 6), (k, 6), (v, 5))]
    expected = recurrence(*wide, g, beta)
    q, k, v, g, beta = (part.float()[None] for part in (*wide, g, beta))
    theirs, _ = torch_chunk_gated_delta_rule(
        *(part.repeat_interleave(2, 2) for part in (q, k)), v, g=g, beta=beta, use_qk_l2norm_in_kernel=True
    )
    errors = [(one[0] - expected).abs().max() for one in (gated_delta_rule(q, k, v, g, beta), theirs)]
    assert errors[0] <= max(2 * errors[1], 1e-6)


def test_a_pack_is_its_documents_with_all_gradients() -> None:
    ours, theirs = ([part.clone().requires_grad_() for part in inputs(BOUNDS[-1])] for _ in range(2))
    found = chunked_rule(*ours, KIND, BOUNDS)
    *columns, weight = theirs
    parts = [alone(*(part[first:last] for part in columns), weight) for first, last in pairwise(BOUNDS)]
    expected = torch.cat(parts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    for out in (found, expected):
        out.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)


def test_norms_of_one_plus_w_keep_a_small_w_in_bfloat16() -> None:
    class Config:
        params_dtype, sequence_parallel, layernorm_zero_centered_gamma = torch.bfloat16, False, True

    norm = RMSNorm(Config(), 8, eps=1e-6)
    with torch.no_grad():
        norm.weight.fill_(2**-9)  # 1 + w is 1 in bfloat16
    x = torch.ones(1, 8, dtype=torch.bfloat16) * 256
    wide = norm(x.float()).detach()
    assert float(wide[0, 0]) == pytest.approx(1 + 2**-9, rel=1e-6)
