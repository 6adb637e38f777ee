"""Random updates: whatever the lengths and the layout, the plan keeps what it promises."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.data.pack_plan import plan_packs
from bapo_megatron.types import PackLayout


class Case(NamedTuple):
    lengths: list[int]
    pack_tokens: int
    layout: PackLayout

    @property
    def capacity(self) -> int:
        return self.pack_tokens // self.layout.length_multiple * self.layout.length_multiple

    def plan(self) -> list[list[list[int]]]:
        return plan_packs(self.lengths, self.pack_tokens, self.layout)

    def tokens(self, pack: list[int]) -> int:
        return sum(self.lengths[i] for i in pack)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    document = draw(st.integers(1, 4))
    multiple = document * draw(st.integers(1, 3))
    pack_tokens = draw(st.integers(multiple, 150))
    most = pack_tokens // multiple * multiple // document
    pieces = draw(st.lists(st.integers(0, most), max_size=60))
    layout = PackLayout(
        0,
        data_size=draw(st.integers(1, 5)),
        length_multiple=multiple,
        count_multiple=draw(st.integers(1, 4)),
        document_multiple=document,
        fixed_length=draw(st.booleans()),
        quadratic=draw(st.sampled_from([0.0, 0.01, 1.0])),
    )
    return Case([document * n for n in pieces], pack_tokens, layout)


@given(cases())
@settings(derandomize=True)
def test_every_document_is_in_one_pack_and_no_pack_overflows(case: Case) -> None:
    packs = [pack for rank in case.plan() for pack in rank]
    assert sorted(i for pack in packs for i in pack) == list(range(len(case.lengths)))
    assert all(case.tokens(pack) <= case.capacity for pack in packs)


@given(cases())
@settings(derandomize=True)
def test_ranks_have_as_many_packs_in_a_multiple_and_none_to_spare(case: Case) -> None:
    """Any two packs of best fit hold more than one capacity: fewer than 2 tokens / capacity + 1 suffice."""
    plan = case.plan()
    assert len(plan) == case.layout.data_size
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % case.layout.count_multiple == 0
    step = case.layout.data_size * case.layout.count_multiple
    enough = max(1, math.ceil(2 * sum(case.lengths) / case.capacity))
    assert sum(len(rank) for rank in plan) <= math.ceil(enough / step) * step


@given(cases())
@settings(derandomize=True)
def test_the_heaviest_pack_of_a_rank_comes_first(case: Case) -> None:
    def cost(pack: list[int]) -> int:
        """In whole tokens, as the plan counts; packs of one length differ by attention alone."""
        attention = sum(round(case.layout.quadratic * case.lengths[i] ** 2) for i in pack)
        return attention + (0 if case.layout.fixed_length else case.tokens(pack))

    for rank in case.plan():
        assert all(cost(before) >= cost(after) for before, after in pairwise(rank))


@given(cases(), st.randoms(use_true_random=False))
@settings(derandomize=True)
def test_the_plan_follows_from_the_lengths(case: Case, random: object) -> None:
    """The same twice, and the same lengths in the same packs in whatever order the samples come."""

    def shape(of: Case) -> list[list[list[int]]]:
        return sorted(sorted([of.lengths[i] for i in pack] for pack in rank) for rank in of.plan())

    assert case.plan() == case.plan()
    shuffled = list(case.lengths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert shape(case) == shape(case._replace(lengths=shuffled))
