"""Which prompts a run gets: shares of several sources at every prefix, resumes, the filter by difficulty."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config import DataConfig
from bapo_megatron.data.prompts import (
    MixedSource,
    Mixture,
    PromptOrder,
    ProportionalInterleaving,
    data_order,
)
from bapo_megatron.data.rows import within_difficulty
from bapo_megatron.errors import ConfigError
from bapo_megatron.types import Prompt

NUMBERS = st.one_of(st.integers(1, 40), st.sampled_from([0.1, 0.25, 0.3333, 1.5, 1e-3, 7.7]))
WEIGHTS = st.lists(NUMBERS, min_size=1, max_size=6)


def assigned(weights: list[float], places: int, start: int = 0) -> list[int]:
    chairman = ProportionalInterleaving(weights)
    return [chairman.next_after(number)[0] for number in range(start, start + places)]


def literal(weights: list[float], places: int) -> list[int]:
    """The rule as the paper states it, in fractions."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [one / sum(exact) for one in exact]
    sources = len(weights)
    counts, found = [0] * sources, []
    for place in range(1, places + 1):
        if sources == 1:
            found.append(0)
            continue
        floor = Fraction(1, 2 * sources - 2)
        eligible = [i for i in range(sources) if place * shares[i] - counts[i] >= floor]
        slack = {i: (1 - floor - (place * shares[i] - counts[i])) / shares[i] for i in eligible}
        choice = min(eligible, key=lambda i: (slack[i], i))
        counts[choice] += 1
        found.append(choice)
    return found


def test_sources_by_hand() -> None:
    """Shares 2/3 and 1/3; k = 2: a source must be owed 1/2 at least, and is late when it is owed more.

    Place 1: owed 2/3 and 1/3: only 0 may. Place 2: owed 1/3 (4/3 - 1) and 2/3: only 1. Place 3: owed 1
    (2 - 1) and 0 (1 - 1): only 0. Then all is even, and it begins anew.

    Shares 1/2, 1/4, 1/4; k = 3: owed 1/4 at least; slack (3/4 - owed) / share. Place 1: owed 1/2, 1/4, 1/4:
    slack 1/2, 2, 2: source 0. Place 2: owed 0, 1/2, 1/2: slack 1 and 1, the first: 1. Place 3: owed 1/2,
    -1/4, 3/4: slack 1/2 and 0: 2. Place 4: owed 1, 0, 0: 0.
    """
    assert assigned([2, 1], 6) == [0, 1, 0, 0, 1, 0]
    assert assigned([2, 1, 1], 8) == [0, 1, 2, 0] * 2


@given(WEIGHTS)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_it_is_the_rule_of_the_paper(weights: list[float]) -> None:
    assert assigned(weights, 100) == literal(weights, 100)


@given(WEIGHTS, st.lists(st.integers(0, 400), min_size=1, max_size=12))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_place_may_be_asked_for_in_any_order(weights: list[float], places: list[int]) -> None:
    whole, chairman = assigned(weights, 401), ProportionalInterleaving(weights)
    for place in places:
        choice, before = chairman.next_after(place)
        assert (choice, before) == (whole[place], whole[:place].count(whole[place]))


SOURCES = (MixedSource("a", 5, 2, "aa"), MixedSource("b", 3, 1, "bb"), MixedSource("c", 4, 0.5, "cc"))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_resumed_anywhere_is_the_one_that_never_stopped(shuffle: bool) -> None:
    whole = Mixture(SOURCES, 7, shuffle).take(0, 80)
    for taken, count in itertools.product(range(0, 78, 7), (1, 2)):
        assert Mixture(SOURCES, 7, shuffle).take(taken, count) == whole[taken : taken + count]


def test_each_source_has_shuffled_epochs_of_its_own() -> None:
    """Its prompts lie together in the dataset; each comes once in each of its epochs."""
    places = Mixture(SOURCES, 7, shuffle=True).take(0, 70)
    for start, source in ((0, SOURCES[0]), (5, SOURCES[1]), (8, SOURCES[2])):
        own = [(epoch, index - start) for epoch, index in places if start <= index < start + source.prompts]
        assert len(own) == 70 * source.weight / 3.5
        for epoch, found in itertools.groupby(own, key=lambda one: one[0]):
            indices = [index for _, index in found]
            assert len(set(indices)) == len(indices)
            assert epoch == own[-1][0] or sorted(indices) == list(range(source.prompts))
    assert places != Mixture(SOURCES, 8, shuffle=True).take(0, 70)
    twins = Mixture((MixedSource("a", 9, 1, ""), MixedSource("b", 9, 1, "")), 3, shuffle=True).take(0, 18)
    first, second = ([index % 9 for _, index in twins if index // 9 == of] for of in (0, 1))
    assert first != second, "equal sources are shuffled differently"
    unshuffled = [index for _, index in Mixture(SOURCES, 7, shuffle=False).take(0, 7)]
    assert [index for index in unshuffled if index < 5] == [0, 1, 2, 3]


def test_one_source_comes_in_the_order_of_the_only_file() -> None:
    alone = PromptOrder(5, 7, True).take(0, 30)
    assert Mixture(SOURCES[:1], 7, True).take(0, 30) == data_order(5, (), 7, True).take(0, 30) == alone


PATH = "model_difficulty.DeepSeek-R1-Distill-Qwen-1.5B"


def prompt(number: int, value: Any) -> Prompt:
    info = {"index": number, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-1.5B": value, "other": 1}}
    return Prompt(number, np.array([1]), "", "", info)


VALUES = [0, 1, 8, 15, 16, None, True, "n/a", "3.5", "9e99999999", "1e-9", "nan"]
PROMPTS = [prompt(n, value) for n, value in enumerate(VALUES)]
PROMPTS.append(Prompt(12, np.array([1]), "", "", {}))


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"difficulty": PATH, "min_difficulty": 1, "max_difficulty": 15}, [1, 2, 3, 8]),
        ({"difficulty": PATH}, [0, 1, 2, 3, 4, 8, 10]),  # those with a number
        ({"min_difficulty": 3}, list(range(13))),  # without a difficulty all stay
        ({"difficulty": PATH, "min_difficulty": 17}, "they span 0.0 to 16.0"),
        ({"difficulty": "model_difficulty.nobody"}, "no row has that number"),
        ({"difficulty": "index.deeper"}, "no row has that number"),
    ],
)
def test_prompts_of_a_difficulty(settings: dict[str, Any], left: list[int] | str) -> None:
    data = DataConfig(Path("d"), **settings)
    if isinstance(left, str):
        with pytest.raises(ConfigError, match=left):
            within_difficulty(PROMPTS, data)
    else:
        assert [p.prompt_id for p in within_difficulty(PROMPTS, data)] == left
