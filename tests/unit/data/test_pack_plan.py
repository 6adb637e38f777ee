"""The plan of the packs: hand-worked balance, capacity, and how level long-tailed updates come out."""

from __future__ import annotations

import numpy as np
import pytest

from bapo_megatron.data.pack_plan import Documents, balance, plan_packs
from bapo_megatron.types import PackLayout


def rank_costs(plan: list[list[list[int]]], lengths: list[int], quadratic: float) -> np.ndarray:
    costs = np.array(lengths) + quadratic * np.square(lengths, dtype=float)
    return np.array([sum(costs[i] for pack in rank for i in pack) for rank in plan])


def long_tailed(number: int, longest: int, seed: int) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(np.log(0.25 * longest), 0.9, number)
    return [int(length) for length in np.clip(lengths, 64, longest)]


def test_costs_are_balanced_not_tokens() -> None:
    """cost(4) = 4 + 16 = 20, cost(2) = 2 + 4 = 6: the long one against all four short ones, 20 : 24.

    Equal tokens, [4, 2] and [2, 2, 2], would cost 26 : 18.
    """
    assert plan_packs([4, 2, 2, 2, 2], 8, PackLayout(data_size=2, quadratic=1.0)) == [[[1, 2, 3, 4]], [[0]]]
    assert rank_costs([[[1, 2, 3, 4]], [[0]]], [4, 2, 2, 2, 2], 1.0).tolist() == [24, 20]
    tokens = plan_packs([4, 2, 2, 2, 2], 8, PackLayout(data_size=2))
    assert sorted(sum([4, 2, 2, 2, 2][i] for i in rank[0]) for rank in tokens) == [6, 6]


def test_one_length_comes_first_where_packs_share_it() -> None:
    """The same documents at one length: 6 and 6 tokens, not 4 and 8, which would pad the 4 to 8."""
    plan = plan_packs([4, 2, 2, 2, 2], 8, PackLayout(data_size=2, quadratic=1.0, fixed_length=True))
    assert plan == [[[0, 3]], [[1, 2, 4]]]


def test_attention_is_balanced_over_ranks_at_one_length() -> None:
    """Packs of 8: 8 | 7 1 | 6 2 | 4 4, attention 64, 50, 40, 32. Best is 64 + 32 : 50 + 40."""
    layout = PackLayout(data_size=2, quadratic=1.0, fixed_length=True)
    plan = plan_packs([8, 7, 6, 4, 4, 2, 1], 8, layout)
    assert plan == [[[0], [3, 4]], [[1, 6], [2, 5]]]


def test_at_one_length_tokens_do_not_count() -> None:
    """Packs of 2 on two ranks: 2 | empty against 1 1 | 1 1, attention 4 : 4, although tokens are 2 : 4."""
    layout = PackLayout(data_size=2, count_multiple=2, quadratic=1.0, fixed_length=True)
    assert plan_packs([2, 1, 1, 1, 1], 2, layout) == [[[0], []], [[1, 4], [2, 3]]]


@pytest.mark.parametrize("fixed", [False, True])
def test_packs_of_a_rank_are_leveled(fixed: bool) -> None:
    """Longest first gives 3 2 2 | 3 2; exchanging a 3 for a 2 makes it 6 : 6."""
    assert plan_packs([3, 3, 2, 2, 2], 8, PackLayout(fixed_length=fixed)) == [[[0, 1], [2, 3, 4]]]


def test_the_heaviest_pack_of_a_rank_comes_first() -> None:
    assert plan_packs([3, 5, 4], 5, PackLayout()) == [[[1], [2], [0]]]


def test_a_tight_filling_where_like_packs_need_more() -> None:
    """Longest to the emptiest gives 6 3 | 5 4 and has no room for the 2; best fit gives 6 4 | 5 3 2."""
    assert plan_packs([6, 5, 4, 3, 2], 10, PackLayout()) == [[[0, 2], [1, 3, 4]]]


@pytest.mark.parametrize(
    ("lengths", "pack_tokens", "layout", "message"),
    [
        ([3, 51], 50, PackLayout(), r"51 tokens .* does not fit into packs of 50 .* at least 51"),
        ([49], 50, PackLayout(length_multiple=8), r"packs of 48 \(pack_tokens=50, .*=8\).* at least 56"),
        ([4], 3, PackLayout(length_multiple=4), r"packs of 0 \(pack_tokens=3"),
    ],
)
def test_a_sample_longer_than_a_pack_is_refused(
    lengths: list[int], pack_tokens: int, layout: PackLayout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_packs(lengths, pack_tokens, layout)


def test_packs_stay_within_a_multiple_of_the_length() -> None:
    """Packs of 10 hold 8 at multiples of 4, so 4 + 5 must not share one."""
    [packs] = plan_packs([4, 5], 10, PackLayout(length_multiple=4))
    assert packs == [[1], [0]]


def test_no_samples_are_empty_packs() -> None:
    for fixed in (False, True):
        assert plan_packs([], 8, PackLayout(0, 2, 1, 3, fixed_length=fixed)) == [[[], [], []]] * 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [4, 16])
def test_long_tailed_updates_come_out_level(ranks: int, seed: int) -> None:
    """256 samples, the longest as long as a pack; the slowest rank decides how long the update takes."""
    lengths = long_tailed(256, 65536, seed)
    plan = plan_packs(lengths, 65536, PackLayout(data_size=ranks, quadratic=1e-5))
    costs = rank_costs(plan, lengths, 1e-5)
    assert costs.max() <= 1.03 * costs.mean()
    assert sum(len(rank) for rank in plan) <= 1.1 * sum(lengths) / 65536 + ranks


@pytest.mark.parametrize("seed", range(4))
def test_one_length_pads_little_and_comes_out_level(seed: int) -> None:
    """Packs twice as long as the longest sample, in multiples of four on each of eight ranks."""
    lengths = long_tailed(512, 65536, seed)
    layout = PackLayout(0, 8, 16, 4, fixed_length=True, quadratic=1e-5)
    plan = plan_packs(lengths, 131072, layout)
    totals = [[sum(lengths[i] for i in pack) for pack in rank] for rank in plan]
    length = max(max(rank) for rank in totals)
    tokens = length * sum(len(rank) for rank in plan)
    assert sum(lengths) >= 0.98 * tokens
    costs = length * len(plan[0]) + rank_costs(plan, lengths, 1e-5) - [sum(rank) for rank in totals]
    assert costs.max() <= 1.03 * costs.mean()


def test_balancing_exchanges_a_document_for_a_shorter_one() -> None:
    """7 + 4 against 5 + 2 (11 : 7) in full packs of 11 and 8: 7 for 5 gives 9 : 9."""
    lengths = np.array([7, 4, 5, 2])
    groups = [[[0, 1]], [[2, 3]]]
    balance(groups, Documents(lengths, lengths, 11), slack=0)
    assert [sorted(group[0]) for group in groups] == [[1, 2], [0, 3]]


def test_balancing_moves_a_document_where_there_is_room() -> None:
    """Three of 3 against one: moving one gives 6 : 6."""
    lengths = np.array([3, 3, 3, 3])
    groups = [[[0, 1, 2]], [[3]]]
    balance(groups, Documents(lengths, lengths, 9), slack=0)
    assert groups == [[[1, 2]], [[3, 0]]]


def test_balancing_stops_where_there_is_no_room() -> None:
    """Weights 9 : 1 as before, but the light document takes 6 of 9 tokens: nothing fits beside it."""
    groups = [[[0, 1]], [[2]]]
    balance(groups, Documents(np.array([5, 4, 6]), np.array([5, 4, 1]), 9), slack=0)
    assert groups == [[[0, 1]], [[2]]]


def test_balancing_goes_on_to_the_next_group() -> None:
    """Weights 5 4 | 1 | 2. The 1 fills its pack of 9 tokens, so the 5 changes places with the 2."""
    groups = [[[0, 1]], [[2]], [[3]]]
    balance(groups, Documents(np.array([5, 4, 9, 2]), np.array([5, 4, 1, 2]), 9), slack=0)
    assert groups == [[[1, 3]], [[2]], [[0]]]


def test_balancing_stops_at_the_slack_and_at_the_work() -> None:
    """9 : 1 is 4 above the mean of 5."""
    lengths = np.array([5, 4, 1])
    for slack, work in ((4.0, 10**6), (3.9, 5000)):
        groups = [[[0, 1]], [[2]]]
        balance(groups, Documents(lengths, lengths, 9), slack, work)
        assert groups == [[[0, 1]], [[2]]]


def test_balancing_exchanges_whole_packs() -> None:
    """All packs are full. Weights (5 4) 8 : 2 (1 0), the packs in brackets of unequal pieces.

    Best is (5 4) for 2: 10 : 10. Single documents, 8 for 2, would give 11 : 9.
    """
    tokens, weights = np.array([3, 2, 5, 5, 4, 1]), np.array([5, 4, 8, 2, 1, 0])
    groups = [[[0, 1], [2]], [[3], [4, 5]]]
    balance(groups, Documents(tokens, weights, 5), slack=0)
    assert groups == [[[3], [2]], [[0, 1], [4, 5]]]
