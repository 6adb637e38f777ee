"""Packed attention against a dense mask, whole and in chunks; load of the experts by hand."""

from __future__ import annotations

import math
import types
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from bapo_megatron.policy import attention
from bapo_megatron.policy.attention import (
    DocumentAttention,
    DocumentPack,
    flash_attention,
    groups_of_like_length,
    prefix_attention,
)
from bapo_megatron.policy.experts import PackLoad, PackRoutes, RouterChoice, RouterCounters
from bapo_megatron.policy.positions import positions
from bapo_megatron.tensor_types import MicroBatch

CONFIG = types.SimpleNamespace(kv_channels=8, context_parallel_size=1)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Softmax over a [tokens, tokens] mask in float64."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(q.size(0))
    mask = (document[:, None] == document) & (place[:, None] >= place)
    k, v = (x.double().repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / 8**0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def agree(ours: torch.Tensor, inputs: Any, expected: torch.Tensor, wide: Any) -> None:
    """Values and gradients."""
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    ours.square().sum().backward()
    expected.square().sum().backward()
    for narrow, reference in zip(inputs, wide, strict=True):
        torch.testing.assert_close(narrow.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1], [5], [3, 3, 3], [1, 40, 2, 17, 1], [2, 0, 3]])
def test_agrees_with_a_dense_mask_and_its_gradient(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    inputs = [
        torch.randn(sum(lengths), heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)
    ]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    bounds = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    packed = DocumentPack.of(bounds, max(lengths), inputs[0].device)
    ours = DocumentAttention(CONFIG)(*inputs, None, packed_seq_params=packed)
    agree(ours, inputs, dense(*wide, lengths), wide)


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
    agree(prefix_attention(*inputs, 0.3), inputs, last_queries(*wide, 0.3), wide)


def flash_varlen(
    q: Any, k: Any, v: Any, *bounds: Any, scale: float, window_size: Any, enable_gqa: bool
) -> torch.Tensor:
    """What torch's variable-length kernel computes: each sequence, causal up to the last query and key."""
    assert enable_gqa
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
def test_chunks_of_cp_ranks_are_the_whole(size: int, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


PROBABILITY_TE = torch.tensor(
    [[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5], [0.5, 0.125, 0.25, 0.125], [0.7, 0.1, 0.1, 0.1]]
)
"""Of four tokens, the last one padding."""
ENTROPY = 1.75 * math.log(2)  # of each of the others
REAL_T = torch.tensor([1.0, 1, 1, 0], dtype=torch.float64)


class Model:
    """What the counters read of the model's configuration."""

    num_layers = 2
    num_moe_experts = 4


@pytest.fixture
def counters() -> RouterCounters:
    found = RouterCounters.of([MicroBatch.of((0, 4))], 0, cast(Any, Model()), torch.device("cpu"))
    assert found is not None
    return found


def routed(choice: RouterChoice, pre_softmax: bool = False) -> torch.Tensor:
    """Which experts megatron's routing sends each token to."""
    logit_TE = PROBABILITY_TE.log().requires_grad_()
    _, chosen_TE = topk_routing_with_score_function(
        logit_TE, 2, use_pre_softmax=pre_softmax, router_replay=choice
    )
    return chosen_TE


def test_engines_that_keep_keys_have_other_routes_behind_tokens_of_older_weights() -> None:
    pack = MicroBatch.of((0, 4))
    pack.mask_T[:3], pack.version_T[:] = 1, torch.tensor([5, 5, 4, 5])
    pack.oldest_version_T[:] = torch.tensor([5, 4, 4, 5])
    for keeps_keys, expected in ((False, [True, True, False, False]), (True, [True, False, False, False])):
        counters = RouterCounters.of([pack], 5, cast(Any, Model()), torch.device("cpu"), keeps_keys)
        assert counters is not None
        assert counters.same_weights(pack).tolist() == expected


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_tokens_and_entropies_by_hand(counters: RouterCounters, pre_softmax: bool) -> None:
    """In the second of two layers: experts 0 and 1, 2 and 3, 0 and 2; padding is not counted, and a pass
    without gradients counts nothing, such as the first run of a layer that is recomputed."""
    choice = RouterChoice(pre_softmax)
    choice.layer, choice.load = 2, PackLoad(REAL_T, counters.load_LC)
    with torch.no_grad():
        routed(choice, pre_softmax)
    assert not counters.sums.any()
    choice.load = PackLoad(REAL_T, counters.load_LC)
    routed(choice, pre_softmax)
    assert counters.load_LC[0].tolist() == [0.0] * 6
    assert counters.load_LC[1, :5].tolist() == [2, 1, 2, 1, 3]
    assert float(counters.load_LC[1, 5]) == pytest.approx(3 * ENTROPY, rel=1e-6)
    routed(choice, pre_softmax)
    assert counters.load_LC[1, 4] == 3, "a layer counts where it is told to, once"


@pytest.mark.parametrize("replays", [False, True])
def test_replayed_routes_are_the_load(counters: RouterCounters, replays: bool) -> None:
    """All three tokens to experts 2 and 3, the third one's route unknown; the entropy is the router's.

    The layer is the third of the model, the second of a chunk whose first sends its tokens elsewhere.
    """
    choice = RouterChoice(False)
    choice.layer, load_LC = 3, torch.zeros(3, 6, dtype=torch.float64)
    known_T = torch.tensor([True, True, False, True])
    expert_TLK = torch.tensor([[[0, 1], [2, 3]]] * 4, dtype=torch.uint8)
    choice.routes = PackRoutes(expert_TLK, known_T, known_T, 2, replays, counters.counts)
    choice.load = PackLoad(REAL_T, load_LC)
    chosen_TE = routed(choice)
    load = [1, 0, 3, 2] if replays else [2, 1, 2, 1]
    assert chosen_TE[:3].sum(0).tolist() == load
    assert load_LC[2, :5].tolist() == [*load, 3]
    assert float(load_LC[2, 5]) == pytest.approx(3 * ENTROPY, rel=1e-6)
    assert counters.counts.tolist() == [3, 2, 3, 2]  # the padding here has a route, which no pack's has
