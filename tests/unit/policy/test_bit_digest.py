"""The digests of all ranks' sums: one value if all copies agree, and one more for each copy that differs."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from bapo_megatron.policy.bit_digest import WEIGHTS, RankSums, merged
from bapo_megatron.policy.optimizer_state import STATES

CUT, WHOLE, EXPERT = 10, 1000, 100_000
STATE = {name: (number, 0, 0) for number, name in enumerate(STATES, 1)}


def ranks(replicas: int = 2, tensor: int = 2, expert_replicas: int = 2) -> list[RankSums]:
    """Every rank has CUT of the cut parameters, all WHOLE of the others, and EXPERT of the experts."""
    places = list(product(range(replicas), range(tensor)))
    return [
        RankSums(t, r, number % expert_replicas, {WEIGHTS: (CUT, WHOLE, EXPERT), **STATE}, [7])
        for number, (r, t) in enumerate(places)
    ]


def changed(all_ranks: list[RankSums], index: int, **more: int) -> list[RankSums]:
    """The ranks, with other sums of the weights on one of them."""
    sums = dict(zip(("cut", "whole", "expert"), all_ranks[index].sums[WEIGHTS], strict=True)) | more
    one = dataclasses.replace(all_ranks[index], sums={**all_ranks[index].sums, WEIGHTS: tuple(sums.values())})
    return [*all_ranks[:index], one, *all_ranks[index + 1 :]]


def hexadecimal(*values: int) -> list[str]:
    return [f"{value:016x}" for value in values]


def test_copies_that_agree_have_one_digest() -> None:
    """By hand: two TP shards of a replica, one copy of the whole ones, two ranks of an expert replica."""
    found = merged(ranks())
    assert found[WEIGHTS] == hexadecimal(2 * CUT + WHOLE + 2 * EXPERT)
    assert [found[name] for name in STATES] == [
        hexadecimal(4 * number) for number in range(1, len(STATES) + 1)
    ]
    assert found["step"] == ["7"]


def test_the_order_of_ranks_says_nothing() -> None:
    shuffled = changed(ranks(), 1, whole=1)[::-1]
    assert merged(shuffled) == merged(changed(ranks(), 1, whole=1))


@pytest.mark.parametrize(
    ("change", "others"),
    [
        ({"cut": 11}, [2 * CUT + 1 + WHOLE + 2 * EXPERT]),
        ({"whole": 1001}, [2 * CUT + WHOLE + 1 + 2 * EXPERT]),
        ({"expert": 100_003}, [2 * CUT + WHOLE + 2 * EXPERT + 3]),
    ],
)
def test_a_copy_that_differs_has_a_digest_of_its_own(change: dict[str, int], others: list[int]) -> None:
    """On the last rank: that of the checkpoint's copy comes first."""
    assert merged(changed(ranks(), 3, **change))[WEIGHTS] == hexadecimal(
        2 * CUT + WHOLE + 2 * EXPERT, *others
    )


def test_a_fault_in_the_only_copy_changes_the_digest() -> None:
    alone = ranks(1, 1, 1)
    assert merged(changed(alone, 0, expert=1))[WEIGHTS] == hexadecimal(CUT + WHOLE + 1)


def test_the_work_grows_with_the_ranks_and_not_with_their_square() -> None:
    """1,024 ranks: each rank's sums are read once for each name."""
    reads = 0

    class Counted(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> object:
            nonlocal reads
            reads += 1
            return super().__getitem__(name)

    many = [dataclasses.replace(one, sums=Counted(one.sums)) for one in ranks(256, 4, 1024)]
    merged(many)
    assert reads == len(many) * (1 + len(STATES))
