"""Advantages of a group and the filter of uniform groups, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bapo_megatron.algo.advantages import group_advantages, is_uniform


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # Rewards 1, 0, 0, 0: mean 0.25; squares 0.5625 + 3 * 0.0625 = 0.75; std = sqrt(0.75 / 3) = 0.5.
    # (1 - 0.25) / 0.5 = 1.5 and -0.25 / 0.5 = -0.5; the epsilon of 1e-6 takes 2 millionths of that.
    got = group_advantages([1.0, 0.0, 0.0, 0.0], "grpo")
    assert got.dtype == np.float32
    assert got.tolist() == pytest.approx([1.5 / 1.000002, *[-0.5 / 1.000002] * 3], rel=1e-7)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    got = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), "dr_grpo")
    assert got.dtype == np.float32
    assert got.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_nearly_equal_rewards_give_no_huge_advantages() -> None:
    # The sample std of x, x + 1e-9 is 7e-10, which is nothing beside 1e-6.
    assert np.abs(group_advantages([0.0, 1e-9], "grpo")).max() < 1e-3


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [1.0], [-7.3] * 16])
def test_equal_rewards_give_exact_zeros(kind: str, rewards: list[float]) -> None:
    assert group_advantages(rewards, kind).tolist() == [0.0] * len(rewards)


def test_mean_of_equal_rewards_may_differ_from_them() -> None:
    """Why uniform groups are told apart before the mean is subtracted."""
    assert np.mean([0.1] * 3) != 0.1


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [math.inf, 0.0]])
def test_rewards_must_be_finite(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="finite rewards"):
        group_advantages(rewards, "grpo")


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_rewards_that_differ_by_rounding_train_nothing(kind: str) -> None:
    assert group_advantages([0.1 + 0.2, 0.3] * 4, kind).tolist() == [0.0] * 8


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_a_reward_that_no_float32_holds_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="as large as 1e[+]18"):
        group_advantages([1e300, -1e300], kind)
    assert np.isfinite(group_advantages([1e18, -1e18], kind)).all()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        *(([], True), ([1.0], True), ([0.5, 0.5], True), ([0.0, 1.0], False), ([1.0, 1.0, 0.0], False)),
        # equal but for rounding: of a sum, of float32, of large numbers
        ([0.1 + 0.2, 0.3] * 4, True),
        ([float(np.float32(0.35)), 0.35], True),
        ([-1e8, np.nextafter(-1e8, 0)], True),
        *(([1.0, 1.0 - 1e-6], False), ([0.0, 1e-9], False), ([0.0, 0.0], True)),
    ],
)
def test_is_uniform(rewards: list[float], expected: bool) -> None:
    assert is_uniform(rewards) is expected
    assert is_uniform(np.array(rewards)) is expected
