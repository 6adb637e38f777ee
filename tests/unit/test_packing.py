"""Rollouts to packs: the shift, the masks, the weights, the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.data.packing import (
    Sample,
    pack_samples,
    plan_packs,
    samples_of,
    split_into_updates,
)
from bapo_megatron.types import Group, PackLayout, Prompt, Rollout


def sample(prompt: list[int], response: list[int], advantage: float = 1.0, version: int = 0) -> Sample:
    count = len(response)
    return Sample(
        token_ids=np.array(prompt + response, dtype=np.int32),
        log_probs_R=-np.arange(1, count + 1, dtype=np.float32),
        versions_R=np.full(count, version, dtype=np.int32),
        advantage=advantage,
    )


def test_fields_stand_at_the_predicting_token() -> None:
    """Prompt [5, 6], response [7, 8]: position 0 predicts 6 (no loss), 1 predicts 7, 2 predicts 8."""
    [pack] = pack_samples([sample([5, 6], [7, 8], advantage=-0.5, version=4)], pack_tokens=16)
    assert pack.token_T.tolist() == [5, 6, 7]
    assert pack.label_T.tolist() == [6, 7, 8]
    assert pack.position_T.tolist() == [0, 1, 2]
    assert pack.mask_T.tolist() == [0, 1, 1]
    assert pack.weight_T.tolist() == [0, 1, 1]
    assert pack.advantage_T.tolist() == [0, -0.5, -0.5]
    assert pack.rollout_log_prob_T.tolist() == [0, -1, -2]
    assert pack.version_T.tolist() == [0, 4, 4]
    assert pack.cu_seqlens.tolist() == [0, 3]
    assert pack.rows == ((0, 0, 3),)


def test_documents_follow_each_other_and_positions_restart() -> None:
    [pack] = pack_samples([sample([1], [2]), sample([3, 4], [5, 6, 7])], pack_tokens=16)
    assert pack.token_T.tolist() == [3, 4, 5, 6, 1]
    assert pack.position_T.tolist() == [0, 1, 2, 3, 0]
    assert pack.cu_seqlens.tolist() == [0, 4, 5]
    assert pack.rows == ((1, 0, 4), (0, 4, 1))


def test_length_is_rounded_up_and_padding_counts_nowhere() -> None:
    [pack] = pack_samples([sample([1], [2, 3])], 16, layout=PackLayout(length_multiple=4))
    assert pack.token_T.tolist() == [1, 2, 0, 0]
    assert pack.mask_T.tolist() == [1, 1, 0, 0]
    assert pack.cu_seqlens.tolist() == [0, 2, 4]


def test_long_padding_is_cut_into_documents() -> None:
    samples = [sample([1], [2] * 1299), sample([1], [2])]
    packs = [pack_samples(samples, 1400, layout=PackLayout(rank, 2))[0] for rank in range(2)]
    assert [pack.cu_seqlens.tolist() for pack in packs] == [[0, 1299], [0, 1, 513, 1025, 1299]]


def test_sequence_mean_weighs_every_response_alike() -> None:
    """Responses of 1 and 3 tokens: mean 2, weights 2 and 2/3; both sum to 2, all to the 4 tokens."""
    [pack] = pack_samples([sample([1], [2]), sample([3], [4, 5, 6])], 16, loss_mean="sequence")
    assert pack.weight_T.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 5), st.integers(50, 120))
@settings(deadline=None)
def test_every_sample_is_in_one_pack_and_no_pack_overflows(
    lengths: list[int], data_size: int, capacity: int
) -> None:
    packs = plan_packs(lengths, capacity, data_size)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)
    assert len(packs) % data_size == 0


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=50)
def test_ranks_share_the_samples_and_the_shape(
    lengths: list[int], data_size: int, multiple: int, count: int
) -> None:
    samples = [sample([1], list(range(n))) for n in lengths]
    layouts = [PackLayout(rank, data_size, multiple, count) for rank in range(data_size)]
    ranks = [pack_samples(samples, 40, "token", layout) for layout in layouts]
    assert len(ranks[0]) % count == 0
    assert len({len(packs) for packs in ranks}) == 1
    shapes = {pack.token_T.numel() for packs in ranks for pack in packs}
    assert len(shapes) == 1
    assert shapes.pop() % multiple == 0
    rows = [row[0] for packs in ranks for pack in packs for row in pack.rows]
    assert sorted(rows) == list(range(len(samples)))
    tokens = sum(float(pack.mask_T.sum()) for packs in ranks for pack in packs)
    assert tokens == sum(lengths)


def test_a_sample_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="51 tokens does not fit into packs of 50"):
        plan_packs([3, 51], 50, 1)


def group(rewards: list[float]) -> Group:
    prompt = Prompt(0, np.array([1, 2], dtype=np.int32), "3", "test")
    rollouts = tuple(
        Rollout(
            np.array([3], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), "stop", reward
        )
        for reward in rewards
    )
    return Group(prompt, rollouts)


def test_advantages_are_normalized_within_a_group() -> None:
    samples = samples_of([group([1.0, 0.0]), group([0.0, 0.0, 3.0])], "dr_grpo")
    assert [s.advantage for s in samples] == pytest.approx([0.5, -0.5, -1.0, -1.0, 2.0])
    assert samples[0].token_ids.tolist() == [1, 2, 3]


@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 5))
def test_updates_share_the_groups(count: int, updates: int, seed: int) -> None:
    groups = [group([float(i), 0.0]) for i in range(count)]
    parts = split_into_updates(groups, updates, (seed, 1))
    assert sorted(g.rollouts[0].reward for part in parts for g in part) == list(range(count))
    assert len(parts) == min(updates, count)
    sizes = [len(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(sizes)
    again = split_into_updates(groups, updates, (seed, 1))
    assert [[id(g) for g in part] for part in again] == [[id(g) for g in part] for part in parts]


def test_packing_builds_tensors_of_the_stated_types() -> None:
    [pack] = pack_samples([sample([1], [2])], 8)
    assert pack.version_T.dtype == pack.cu_seqlens.dtype == torch.int32
    assert pack.mask_T.dtype == pack.rollout_log_prob_T.dtype == torch.float32
