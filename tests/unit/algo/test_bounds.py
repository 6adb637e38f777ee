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
    search_bounds,
)

THREE_BY_TWO = BoundsConfig(
    low_start=0.6, low_end=0.8, low_step=0.1, high_start=1.5, high_end=2.0, high_step=0.5, target=0.5
)  # c_low in 0.6, 0.7, 0.8; c_high in 1.5, 2.0


def test_paper_ranges_have_37_and_16_candidates() -> None:
    """A float loop would stop at 0.88: its sum drifts, and 0.88 + 0.02 > 0.9."""
    config = bounds.paper()
    highs, lows = high_values(config), low_values(config)
    assert len(highs) == 37  # (3.0 - 1.2) / 0.05 = 36 steps
    assert len(lows) == 16  # (0.9 - 0.6) / 0.02 = 15 steps
    assert bounds.sum_count(config) == 53
    assert (highs[0], highs[1], highs[-1]) == (1.2, 1.25, 3.0)
    assert (lows[0], lows[1], lows[-1]) == (0.6, 0.62, 0.9)
    whole_steps = BoundsConfig(low_start=0.3, low_end=0.72, low_step=0.2)
    assert low_values(whole_steps) == [0.3, 0.5, 0.7]
    assert low_values(BoundsConfig(low_end=0.7, low_step=0.1)) == [0.6, 0.7]  # 0.1 / 0.1 is below 1


SIGNED = {"share": "signed", "target": 9.0}


@pytest.mark.parametrize(
    ("sums", "changes", "expected"),
    [
        # P(1.5) = 3, N(0.6) = 3: 3 / 6 = 0.5, exactly the target.
        ([3.0, 4.0, 3.0, 2.0, 1.0], {}, Bounds(0.6, 1.5, 0.5, rounds=0, reached=True)),
        # (1.5, 0.6): 1/5 = 0.20; (2.0, 0.6): 2/6 = 0.33; (2.0, 0.7): 2/5 = 0.40; (2.0, 0.8): 2/4 = 0.50.
        ([1.0, 2.0, 4.0, 3.0, 2.0], {}, Bounds(0.8, 2.0, 0.5, rounds=3, reached=True)),
        # (1.5, 0.6): 1/5 = 0.20; (1.5, 0.7): 1/4 = 0.25; (1.5, 0.8): 1/2 = 0.50.
        ([1.0, 2.0, 4.0, 3.0, 1.0], {"order": "low_first"}, Bounds(0.8, 1.5, 0.5, rounds=2, reached=True)),
        # An exhausted search ends at the last pair; an empty range leaves the other bound free.
        ([1.0, 1.0, 9.0, 9.0, 9.0], {}, Bounds(0.8, 2.0, 0.1, rounds=3, reached=False)),
        ([1.0, 4.0, 4.0], {"low_end": 0.6}, Bounds(0.6, 2.0, 0.5, rounds=1, reached=True)),
        ([1.0, 4.0, 1.0, 1.0], {"high_end": 1.5}, Bounds(0.7, 1.5, 0.5, rounds=1, reached=True)),
        # Nothing to balance; nothing over nothing counts as zero, and the search continues.
        ([0.0] * 5, {}, Bounds(0.6, 1.5, 0.0, 0, False)),
        ([0.0, 1.0, 0.0, 0.0, 0.0], {}, Bounds(0.6, 2.0, 1.0, 1, True, one_sign=True)),
        # (1.5, 0.6): 1 / |1 - 2| = 1; (2.0, 0.6): 2 / |2 - 2| = inf.
        ([1.0, 2.0, 2.0, 2.0, 2.0], SIGNED, Bounds(0.6, 2.0, math.inf, 1, True)),
        ([2.0, 3.0, 4.0, 3.0, 2.0], {"share": "ratio", "target": 1.5}, Bounds(0.8, 2.0, 1.5, 3, True)),
        # Fixed bounds report their contribution: 1 / (1 + 3) = 0.25 < 0.4.
        ([1.0, 3.0], vars(bounds.grpo()), Bounds(0.8, 1.2, 0.25, 0, False)),
        ([2.0, 2.0], vars(bounds.clip_higher()), Bounds(0.8, 1.28, 0.5, 0, True)),
        # The worst case of the paper is 36 + 15 moves.
        ([1.0] * 37 + [9.0] * 16, vars(bounds.paper()), Bounds(0.9, 3.0, 0.1, 51, False)),
    ],
)
def test_search_by_hand(sums: list[float], changes: dict[str, Any], expected: Bounds) -> None:
    config = dataclasses.replace(THREE_BY_TWO, **changes)
    assert search_bounds(sums, config) == expected
    dual = dataclasses.replace(config, dual_clip=3.0)  # is handed on, and changes no search
    assert search_bounds(sums, dual) == dataclasses.replace(expected, dual_clip=3.0)


def test_sums_may_be_an_array_or_a_tensor_of_the_right_number_of_finite_values() -> None:
    sums = [1.0, 2.0, 4.0, 3.0, 2.0]
    for same in (np.array(sums), torch.tensor(sums, dtype=torch.float64)):
        assert search_bounds(same, THREE_BY_TWO) == search_bounds(sums, THREE_BY_TWO)
    for wrong in ([], [1.0] * 4, [1.0] * 6):
        with pytest.raises(ValueError, match=rf"expected 5 sums.*got {len(wrong)}"):
            search_bounds(wrong, THREE_BY_TWO)
    for bad, at in itertools.product([math.nan, math.inf], [0, 4]):
        broken = [9.0] * 5
        broken[at] = bad
        with pytest.raises(FloatingPointError, match="the contribution sums are not finite"):
            search_bounds(broken, THREE_BY_TWO)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"low_end": 0.5}, "is below low_start=0.6"),
        ({"low_step": 0.0}, "must be above 0, or set low_end=0.6"),
        ({"low_start": 0.0}, "must be above 0"),
        ({"low_end": 1.2}, "must be below high_start=1.2"),
        ({"target": 0.0}, "must be a finite number above 0"),
        ({"target": 1.0}, "must be below 1 for share=absolute"),
        ({"dual_clip": 1.0}, "must be above 1"),
        ({"bounds_tokens": 0, "scope": "micro_batch"}, "must be at least 1"),
        ({"bounds_tokens": 9}, "sizes the searches of scope=micro_batch; with scope=update"),
    ],
)
def test_problems_name_field_and_value(change: dict[str, Any], says: str) -> None:
    (field, value), *_ = change.items()
    problems = list(dataclasses.replace(BoundsConfig(), **change).problems())
    assert any(problem.startswith(f"{field}={value} {says}") for problem in problems), problems


def test_presets_are_the_readings_they_are_named_after() -> None:
    common = ("uniform", "high_first")
    readings = {
        bounds.paper: ("gradient", "absolute", *common, "micro_batch"),
        bounds.eq8_literal: ("surrogate", "signed", "rollout_probability", "high_first", "update"),
        bounds.balanced: ("gradient", "absolute", *common, "update"),
        bounds.published_code: ("surrogate", "ratio", "uniform", "low_first", "micro_batch"),
    }
    for preset, reading in readings.items():
        config = preset()
        assert (config.measure, config.share, config.weight, config.order, config.scope) == reading
        expected = (1.0, 3.0) if preset is bounds.published_code else (0.4, None)
        assert (config.target, config.dual_clip) == expected
    published = bounds.published_code()
    assert low_values(published) == [0.6, 0.65, 0.7, 0.75, 0.8]
    highs = high_values(published)
    assert (len(highs), highs[0], highs[-1]) == (17, 1.2, 2.0)
    for fixed, high in ((bounds.grpo(), 1.2), (bounds.clip_higher(), 1.28)):
        assert (low_values(fixed), high_values(fixed)) == ([0.8], [high])
        with_clip = dataclasses.replace(fixed, dual_clip=3.0)
        assert bounds.fixed(0.8, high, dual_clip=3.0) == with_clip
