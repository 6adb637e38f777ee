"""Packed attention against a dense mask, whole and in chunks, and how documents are batched."""

from __future__ import annotations

import types
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.policy import attention
from bapo_megatron.policy.attention import (
    DocumentAttention,
    DocumentPack,
    flash_attention,
    groups_of_like_length,
    prefix_attention,
)
from bapo_megatron.policy.positions import positions

CONFIG = types.SimpleNamespace(attention_dropout=0.0, kv_channels=8, context_parallel_size=1)


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
    bounds = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    packed = DocumentPack.of(bounds, max(lengths), q.device)
    ours = DocumentAttention(CONFIG)(*inputs, None, packed_seq_params=packed)
    expected = dense(*wide, lengths)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    ours.square().sum().backward()
    expected.square().sum().backward()
    for narrow, reference in zip(inputs, wide, strict=True):
        torch.testing.assert_close(narrow.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


def last_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax in float64 with a mask that ends at the last query and key; shapes as in prefix_attention."""
    k, v = (x.double().repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    queries, keys = scores.shape[-2:]
    mask = torch.arange(keys)[None] <= torch.arange(keys - queries, keys)[:, None]
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 9), (4, 8), (7, 40)])
def test_prefix_attention_agrees_with_a_dense_mask(queries: int, keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    shapes = (2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours, expected = prefix_attention(*inputs, 0.3), last_queries(*wide, 0.3)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    ours.square().sum().backward()
    expected.square().sum().backward()
    for narrow, reference in zip(inputs, wide, strict=True):
        torch.testing.assert_close(narrow.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


def flash_varlen(
    q, k, v, query_bounds, key_bounds, most_queries, most_keys, *, scale, window_size, enable_gqa
):  # type: ignore[no-untyped-def]
    """What torch's variable-length kernel computes: each sequence, causal up to the last query and key."""
    assert enable_gqa
    bounds = query_bounds, key_bounds, most_queries, most_keys
    return flash_varlen_of_torch_2_11(q, k, v, *bounds, scale=scale, window_size=window_size, groups=2)


def flash_varlen_of_torch_2_11(
    q, k, v, query_bounds, key_bounds, most_queries, most_keys, *, scale, window_size, groups=1
):  # type: ignore[no-untyped-def]
    """The same without grouped-query heads."""
    assert window_size == (-1, 0)
    assert q.size(1) == groups * k.size(1)
    outputs = []
    for (q0, q1), (k0, k1) in zip(
        pairwise(query_bounds.tolist()), pairwise(key_bounds.tolist()), strict=True
    ):
        assert q1 - q0 <= most_queries
        assert k1 - k0 <= most_keys
        parts = (x[a:b][None].transpose(1, 2) for x, a, b in ((q, q0, q1), (k, k0, k1), (v, k0, k1)))
        outputs.append(last_queries(*parts, scale).transpose(1, 2)[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kernel", [None, flash_varlen, flash_varlen_of_torch_2_11])
def test_chunks_of_all_cp_ranks_equal_the_whole(
    size: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    lengths = [8, 24, 0, 16]
    bounds = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    q, k, v = (torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2))
    expected = dense(q, k, v, lengths).unflatten(1, (4, 8))
    run = flash_attention if kernel else attention._by_segment
    for rank in range(size):
        held = positions(bounds, size, rank)
        ours = run(q[held], k, v, bounds, size, rank, 8**-0.5)
        torch.testing.assert_close(ours.double(), expected[held], rtol=1e-5, atol=1e-5)


@given(st.lists(st.integers(0, 500), max_size=40))
def test_padded_batches_hold_every_document_once_with_bounded_padding(lengths: list[int]) -> None:
    groups = groups_of_like_length(lengths)
    assert sorted(d for group in groups for d in group) == [d for d, n in enumerate(lengths) if n]
    for group in groups:
        padded = max(lengths[d] for d in group) * len(group)
        assert padded <= 1.5 * sum(lengths[d] for d in group)


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="dropout"):
        DocumentAttention(
            types.SimpleNamespace(attention_dropout=0.1, kv_channels=8, context_parallel_size=1)
        )
