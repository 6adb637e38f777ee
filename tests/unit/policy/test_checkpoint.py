"""A policy's checkpoint: digests over all ranks, the safe reader's limits."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from bapo_megatron.policy.bit_digest import WEIGHTS, RankSums, merged
from bapo_megatron.policy.optimizer_state import STATES

CUT, WHOLE, EXPERT = 10, 1000, 100_000
STATE = {name: (number, 10 * number, 100 * number) for number, name in enumerate(STATES, 1)}


def ranks(replicas: int = 2, tensor: int = 2, expert_replicas: int = 2) -> list[RankSums]:
    """Every rank has CUT of the cut parameters, all WHOLE of the others, and EXPERT of the experts."""
    places = list(product(range(replicas), range(tensor)))
    return [
        RankSums(t, r, number % expert_replicas, {WEIGHTS: (CUT, WHOLE, EXPERT), **STATE}, [7])
        for number, (r, t) in enumerate(places)
    ]


def hexadecimal(*values: int) -> list[str]:
    return [f"{value:016x}" for value in values]


def test_copies_that_agree_have_one_digest() -> None:
    """By hand: two TP shards of a replica, one copy of the whole ones, two ranks of an expert replica."""
    found = merged(ranks())
    assert found[WEIGHTS] == hexadecimal(2 * CUT + WHOLE + 2 * EXPERT)
    numbers = range(1, len(STATES) + 1)
    # Of the whole ones the two replicas have a share each, on both TP ranks.
    assert [found[name] for name in STATES] == [hexadecimal((4 + 20 + 400) * number) for number in numbers]
    assert found["step"] == ["7"]


@pytest.mark.parametrize(("kind", "value", "more"), [("whole", 1001, 1), ("expert", 100_003, 3)])
def test_a_copy_that_differs_has_a_digest_of_its_own(kind: str, value: int, more: int) -> None:
    """On the last rank: that of the checkpoint's copy comes first."""
    all_ranks, own = ranks(), {"cut": CUT, "whole": WHOLE, "expert": EXPERT, kind: value}
    sums = {**all_ranks[-1].sums, WEIGHTS: (own["cut"], own["whole"], own["expert"])}
    all_ranks[-1] = dataclasses.replace(all_ranks[-1], sums=sums)
    whole = 2 * CUT + WHOLE + 2 * EXPERT
    assert merged(all_ranks)[WEIGHTS] == hexadecimal(whole, whole + more)


def test_a_tp_ranks_state_that_differs_has_a_digest_of_its_own() -> None:
    all_ranks, name = ranks(), STATES[0]
    all_ranks[-1] = dataclasses.replace(all_ranks[-1], sums={**all_ranks[-1].sums, name: (1, 17, 100)})
    assert merged(all_ranks)[name] == hexadecimal(4 + 20 + 400, 4 + 27 + 400)
