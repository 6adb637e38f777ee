"""The candidates, the shares and the search on numbers that a reader can check."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.algo import bounds
from bapo_megatron.algo.bounds import (
    Bounds,
    BoundsConfig,
    high_values,
    low_values,
    positive_share,
    search_bounds,
)

THREE_BY_TWO = BoundsConfig(
    low_start=0.6, low_end=0.8, low_step=0.1, high_start=1.5, high_end=2.0, high_step=0.5, target=0.5
)  # c_low in 0.6, 0.7, 0.8; c_high in 1.5, 2.0


def test_paper_ranges_have_37_and_16_candidates() -> None:
    config = bounds.paper()
    highs, lows = high_values(config), low_values(config)
    assert len(highs) == 37  # (3.0 - 1.2) / 0.05 = 36 steps
    assert len(lows) == 16  # (0.9 - 0.6) / 0.02 = 15 steps
    assert bounds.sum_count(config) == 53
    assert (highs[0], highs[1], highs[-1]) == (1.2, 1.25, 3.0)
    assert (lows[0], lows[1], lows[-1]) == (0.6, 0.62, 0.9)


def test_float_loop_stops_at_088_and_ours_does_not() -> None:
    c_low = 0.6
    while c_low + 0.02 <= 0.9:
        c_low += 0.02
    assert c_low == pytest.approx(0.88)  # the drift of the sum: 0.88 + 0.02 > 0.9
    assert low_values(BoundsConfig())[-1] == 0.9


def test_quotient_that_rounds_down_does_not_lose_the_last_candidate() -> None:
    assert (0.7 - 0.6) / 0.1 < 1.0
    assert low_values(BoundsConfig(low_start=0.6, low_end=0.7, low_step=0.1)) == [0.6, 0.7]


def test_range_that_the_step_does_not_divide_ends_on_the_last_whole_step() -> None:
    config = BoundsConfig(
        high_start=1.2, high_end=1.5, high_step=0.2, low_start=0.6, low_end=0.65, low_step=0.1
    )
    assert high_values(config) == [1.2, 1.4]
    assert low_values(config) == [0.6]


def test_empty_range_is_one_candidate_whatever_the_step() -> None:
    for step in (0.0, -0.02):
        config = BoundsConfig(low_start=0.8, low_end=0.8, low_step=step)
        assert low_values(config) == [0.8]
        assert list(config.problems()) == []


@pytest.mark.parametrize(
    ("positive", "negative", "kind", "expected"),
    [
        (2.0, 3.0, "absolute", 0.4),  # 2 / (2 + 3)
        (2.0, 3.0, "signed", 2.0),  # 2 / |2 - 3|
        (2.0, 4.0, "ratio", 0.5),  # 2 / 4
        (3.0, 1.0, "signed", 1.5),  # 3 / |3 - 1|
        (1.0, 1.0, "signed", math.inf),
        (1.0, 0.0, "ratio", math.inf),
        (1.0, 0.0, "absolute", 1.0),
        (0.0, 1.0, "absolute", 0.0),
        (0.0, 0.0, "absolute", 0.0),
        (0.0, 0.0, "signed", 0.0),
        (0.0, 0.0, "ratio", 0.0),
    ],
)
def test_share(positive: float, negative: float, kind: bounds.Share, expected: float) -> None:
    assert positive_share(positive, negative, kind) == expected


@pytest.mark.parametrize(
    ("sums", "changes", "expected"),
    [
        # P(1.5) = 3, N(0.6) = 3: 3 / 6 = 0.5, exactly the target.
        ([3.0, 4.0, 3.0, 2.0, 1.0], {}, Bounds(0.6, 1.5, 0.5, rounds=0, reached=True)),
        # (1.5, 0.6): 1/5 = 0.20; (2.0, 0.6): 2/6 = 0.33; (2.0, 0.7): 2/5 = 0.40; (2.0, 0.8): 2/4 = 0.50.
        ([1.0, 2.0, 4.0, 3.0, 2.0], {}, Bounds(0.8, 2.0, 0.5, rounds=3, reached=True)),
        # (1.5, 0.6): 1/5 = 0.20; (1.5, 0.7): 1/4 = 0.25; (1.5, 0.8): 1/2 = 0.50.
        ([1.0, 2.0, 4.0, 3.0, 1.0], {"order": "low_first"}, Bounds(0.8, 1.5, 0.5, rounds=2, reached=True)),
        ([1.0, 1.0, 9.0, 9.0, 9.0], {}, Bounds(0.8, 2.0, 0.1, rounds=3, reached=False)),
        ([1.0, 4.0, 4.0], {"low_end": 0.6}, Bounds(0.6, 2.0, 0.5, rounds=1, reached=True)),
        ([1.0, 4.0, 1.0, 1.0], {"high_end": 1.5}, Bounds(0.7, 1.5, 0.5, rounds=1, reached=True)),
    ],
    ids=[
        "a target met at the start moves nothing",
        "high_first raises c_high to its end, then c_low",
        "low_first raises c_low to its end, then c_high",
        "an exhausted search ends at the last pair",
        "an empty low range leaves c_high free",
        "an empty high range leaves c_low free",
    ],
)
def test_search_by_hand(sums: list[float], changes: dict[str, Any], expected: Bounds) -> None:
    assert search_bounds(sums, dataclasses.replace(THREE_BY_TWO, **changes)) == expected


def test_worst_case_of_the_paper_is_51_moves() -> None:
    found = search_bounds([1.0] * 37 + [9.0] * 16, bounds.paper())
    assert (found.low, found.high, found.rounds, found.reached) == (0.9, 3.0, 51, False)  # 36 + 15


def test_fixed_bounds_still_report_their_contribution() -> None:
    # 1 / (1 + 3) = 0.25 < 0.4, and 2 / (2 + 2) = 0.5 > 0.4.
    assert search_bounds([1.0, 3.0], bounds.grpo()) == Bounds(0.8, 1.2, 0.25, 0, False)
    assert search_bounds([2.0, 2.0], bounds.clip_higher()) == Bounds(0.8, 1.28, 0.5, 0, True)


def test_nothing_to_balance_leaves_the_bounds_at_their_starts() -> None:
    assert search_bounds([0.0] * 5, THREE_BY_TWO) == Bounds(0.6, 1.5, 0.0, 0, False)


def test_nothing_over_nothing_counts_as_zero_and_the_search_goes_on() -> None:
    assert search_bounds([0.0, 1.0, 0.0, 0.0, 0.0], THREE_BY_TWO) == Bounds(0.6, 2.0, 1.0, 1, True)


def test_zero_denominator_is_reached() -> None:
    config = dataclasses.replace(THREE_BY_TWO, share="signed", target=9.0)
    # (1.5, 0.6): 1 / |1 - 2| = 1; (2.0, 0.6): 2 / |2 - 2| = inf.
    assert search_bounds([1.0, 2.0, 2.0, 2.0, 2.0], config) == Bounds(0.6, 2.0, math.inf, 1, True)


def test_dual_clip_is_handed_on_and_changes_no_search() -> None:
    config = dataclasses.replace(THREE_BY_TWO, dual_clip=3.0)
    for sums in ([1.0, 2.0, 4.0, 3.0, 2.0], [0.0] * 5):
        assert search_bounds(sums, config) == dataclasses.replace(
            search_bounds(sums, THREE_BY_TWO), dual_clip=3.0
        )


def test_sums_may_be_a_list_an_array_or_a_tensor() -> None:
    sums = [1.0, 2.0, 4.0, 3.0, 2.0]
    expected = search_bounds(sums, THREE_BY_TWO)
    assert search_bounds(tuple(sums), THREE_BY_TWO) == expected
    assert search_bounds(np.array(sums), THREE_BY_TWO) == expected
    assert search_bounds(torch.tensor(sums, dtype=torch.float64), THREE_BY_TWO) == expected


@pytest.mark.parametrize("sums", [[], [1.0] * 4, [1.0] * 6])
def test_wrong_number_of_sums_is_refused(sums: list[float]) -> None:
    with pytest.raises(ValueError, match=rf"expected 5 sums.*got {len(sums)}"):
        search_bounds(sums, THREE_BY_TWO)


@pytest.mark.parametrize(("bad", "at"), itertools.product([math.nan, math.inf], [0, 4]))
def test_sums_that_are_not_finite_are_refused(bad: float, at: int) -> None:
    sums = [9.0] * 5
    sums[at] = bad
    with pytest.raises(FloatingPointError, match="the contribution sums are not finite"):
        search_bounds(sums, THREE_BY_TWO)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low_end": 0.5}, "low_end=0.5 is below low_start=0.6"),
        ({"high_end": 1.1}, "high_end=1.1 is below high_start=1.2"),
        ({"low_step": 0.0}, "low_step=0.0 must be above 0, or set low_end=0.6"),
        ({"high_step": -0.1}, "high_step=-0.1 must be above 0, or set high_end=1.2"),
        (
            {"high_step": 5e-6},
            "high_step=5e-06 cuts 1.2 to 3.0 into 360,000 steps, each with a sum of its own",
        ),
        ({"low_start": 0.0}, "low_start=0.0 must be above 0"),
        ({"high_start": -1.0, "low_start": -2.0, "low_end": -2.0}, "high_start=-1.0 must be above 0"),
        ({"low_end": 1.2}, "low_end=1.2 must be below high_start=1.2"),
        ({"target": 0.0}, "target=0.0 must be a finite number above 0"),
        ({"target": math.nan}, "target=nan must be a finite number above 0"),
        ({"target": math.inf, "share": "ratio"}, "target=inf must be a finite number above 0"),
        ({"target": 1.0}, "target=1.0 must be below 1 for share=absolute"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 must be above 1"),
        ({"dual_clip": math.nan}, "dual_clip=nan must be above 1"),
    ],
)
def test_problems_name_field_and_value(change: dict[str, float], message: str) -> None:
    problems = list(dataclasses.replace(BoundsConfig(), **change).problems())
    assert any(problem.startswith(message) for problem in problems), problems


@pytest.mark.parametrize(
    "config",
    [
        BoundsConfig(),
        bounds.paper(),
        bounds.eq8_literal(),
        bounds.balanced(),
        bounds.published_code(),
        bounds.grpo(),
        bounds.clip_higher(),
        bounds.fixed(0.5, 4.0),
        BoundsConfig(high_end=11.2, high_step=0.001),  # 10,000 steps
        BoundsConfig(high_step=9.0),
        BoundsConfig(share="ratio", target=1.0),
    ],
)
def test_sound_configs_have_no_problems(config: BoundsConfig) -> None:
    assert list(config.problems()) == []


def test_presets_are_the_readings_they_are_named_after() -> None:
    def reading(config: BoundsConfig) -> tuple[str, ...]:
        return config.measure, config.share, config.weight, config.order, config.scope

    assert reading(bounds.paper()) == ("gradient", "absolute", "uniform", "high_first", "micro_batch")
    assert reading(bounds.eq8_literal()) == (
        "surrogate",
        "signed",
        "rollout_probability",
        "high_first",
        "update",
    )
    assert reading(bounds.balanced()) == ("gradient", "absolute", "uniform", "high_first", "update")
    assert reading(bounds.published_code()) == ("surrogate", "ratio", "uniform", "low_first", "micro_batch")
    for preset in (bounds.paper(), bounds.eq8_literal(), bounds.balanced()):
        assert (preset.target, preset.dual_clip) == (0.4, None)


def test_a_preset_is_named_and_another_config_is_not() -> None:
    named = [bounds.paper, bounds.eq8_literal, bounds.balanced, bounds.published_code, bounds.grpo]
    assert [bounds.preset_name(preset()) for preset in named] == [preset.__name__ for preset in named]
    assert bounds.preset_name(BoundsConfig()) == "balanced"
    assert bounds.preset_name(dataclasses.replace(bounds.paper(), target=0.5)) is None


def test_published_code_has_the_ranges_of_its_yaml() -> None:
    config = bounds.published_code()
    assert low_values(config) == [0.6, 0.65, 0.7, 0.75, 0.8]
    assert (len(high_values(config)), high_values(config)[0], high_values(config)[-1]) == (17, 1.2, 2.0)
    assert (config.target, config.dual_clip) == (1.0, 3.0)


def test_baselines_are_fixed_bounds() -> None:
    assert (low_values(bounds.grpo()), high_values(bounds.grpo())) == ([0.8], [1.2])
    assert (low_values(bounds.clip_higher()), high_values(bounds.clip_higher())) == ([0.8], [1.28])


def test_a_preset_takes_a_dual_clip() -> None:
    with_clip = dataclasses.replace(bounds.clip_higher(), dual_clip=3.0)
    assert bounds.fixed(0.8, 1.28, dual_clip=3.0) == with_clip
