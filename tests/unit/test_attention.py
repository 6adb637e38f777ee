"""Packed attention against a dense mask, and how documents are batched."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from bapo_megatron.policy.attention import DocumentAttention, groups_of_like_length

CONFIG = types.SimpleNamespace(attention_dropout=0.0, kv_channels=8)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Softmax over a [tokens, tokens] mask in float64."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(q.size(0))
    mask = (document[:, None] == document) & (place[:, None] >= place)
    k, v = (x.double().repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / 8**0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.mark.parametrize("lengths", [[1], [5], [3, 3, 3], [1, 40, 2, 17, 1], [2, 0, 3]])
def test_agrees_with_a_dense_mask_and_its_gradient(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, heads, 8, generator=generator) for heads in (4, 2, 2))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    ours = DocumentAttention(CONFIG)(*inputs, None, packed_seq_params=packed)
    expected = dense(*wide, lengths)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    ours.square().sum().backward()
    expected.square().sum().backward()
    for narrow, reference in zip(inputs, wide, strict=True):
        torch.testing.assert_close(narrow.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(0, 500), max_size=40))
@settings(deadline=None)
def test_batches_hold_every_document_once_with_bounded_padding(lengths: list[int]) -> None:
    groups = groups_of_like_length(lengths)
    assert sorted(d for group in groups for d in group) == [d for d, n in enumerate(lengths) if n]
    for group in groups:
        padded = max(lengths[d] for d in group) * len(group)
        assert padded <= 1.5 * sum(lengths[d] for d in group)


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="dropout"):
        DocumentAttention(types.SimpleNamespace(attention_dropout=0.1, kv_channels=8))
