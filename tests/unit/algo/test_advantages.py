"""Advantages by hand and against the peers' own functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from bapo_megatron.algo import advantages
from bapo_megatron.algo.advantages import Rewards, build_advantage, is_uniform
from bapo_megatron.algo.parts import ADVANTAGES
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import ConfigError

OURS: dict[str, Callable[..., np.ndarray]] = {name: getattr(advantages, name) for name in ADVANTAGES}
OF_GROUPS = ("grpo", "dr_grpo", "rloo", "grpo_leave_one_out")


def of_group(rewards: list[float], name: str) -> list[float]:
    return build_advantage(AlgorithmConfig(advantage=name))(Rewards.of(rewards)).tolist()


def by_tokens(*values: float) -> Rewards:
    """One group of rewards, whose responses have 1, 2, 3, ... tokens."""
    rewards = Rewards.of(list(values))
    return Rewards(**{**vars(rewards), "tokens_N": np.arange(1, len(values) + 1)})


def test_by_hand() -> None:
    """Rewards 1, 0, 0, 0: mean 0.25; squares 0.5625 + 3 * 0.0625 = 0.75; std = sqrt(0.75 / 3) = 0.5; the
    epsilon of 1e-6 takes 2 millionths. The others' mean is 0 for the right response, and 1/3 for the wrong
    ones, with a deviation of sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3)."""
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert of_group(rewards, "grpo") == pytest.approx([1.5 / 1.000002, *[-0.5 / 1.000002] * 3], rel=1e-7)
    assert of_group(rewards, "dr_grpo") == [0.75, -0.25, -0.25, -0.25]
    assert of_group(rewards, "rloo") == pytest.approx([1.0, *[-1 / 3] * 3])
    assert of_group(rewards, "grpo_leave_one_out") == pytest.approx([1.0, *[-(3**-0.5)] * 3], rel=3e-6)
    assert of_group([1.0, 0.0], "grpo_leave_one_out") == [1.0, -1.0]  # one other: nothing is divided
    # The sample std of x, x + 1e-9 is 7e-10, which is nothing beside 1e-6.
    assert np.abs(of_group([0.0, 1e-9], "grpo")).max() < 1e-3


def test_reinforce_plus_plus_counts_a_response_once_for_each_token() -> None:
    """Rewards 1, 0 of 1 and 2 tokens: mean 1/3, squares 4/9 + 2 * 1/9 = 6/9 over 3 - 1 tokens: 1/3."""
    got = advantages.reinforce_plus_plus(by_tokens(1.0, 0.0))
    assert got.tolist() == pytest.approx([(2 / 3) * 3**0.5, (-1 / 3) * 3**0.5])
    assert advantages.reinforce_plus_plus(Rewards.of([1.0, 1.0], tokens=3)).tolist() == [0.0, 0.0]


def test_gdpo_tells_apart_what_a_sum_does_not() -> None:
    """Right without format, and format without right: equal sums, and with weights 2 and 1 different ones."""
    named = {"correct": [1.0, 0.0, 0.0], "format": [0.0, 1.0, 0.0]}
    rewards = Rewards.of([1.0, 1.0, 0.0], **named)
    # Each: mean 1/3, deviation sqrt(1/3), so 2 / sqrt(3) and -1 / sqrt(3) twice. Weighted by 2 and 1, times
    # sqrt(3): 3, 0, -3; deviation 3.
    got = advantages.gdpo(rewards, {"correct": 2.0, "format": 1.0})
    assert got.tolist() == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)
    alike = advantages.gdpo(rewards)
    assert alike[0] == pytest.approx(alike[1])
    assert alike[0] > alike[2]


# What the functions of verl 1dda039b9 and NeMo-RL 7ea279abf give for these rewards and lengths, in float64.
REWARDS, LENGTHS = [1.0, 0.0, 0.5, 0.25, 2.0, 0.0, 0.0, 1.0], [3, 1, 2, 4, 2, 2, 5, 1]
FORMAT = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
PEERS = {
    "grpo": "1.317462 -1.024693 0.146385 -0.439154 1.305581 -0.783349 -0.783349 0.261116",
    "rloo": "0.75 -0.583333 0.083333 -0.25 1.666667 -1 -1 0.333333",
    "grpo_leave_one_out": "2.999988 -1.527521 0.160128 -0.5 2.886746 -1 -1 0.288675",
    "reinforce_plus_plus": "0.782881 -0.782881 0 -0.391441 2.348644 -0.782881 -0.782881 0.782881",
    "reinforce_plus_plus_baseline": (
        "0.996616 -0.522037 0.237289 -0.142374 2.04069 -0.996616 -0.996616 0.522037"
    ),
    "gdpo": "2.012957 -0.680403 -0.329607 -1.002947 1.00341 -0.402869 -0.402869 -0.197671",
}


def two_groups() -> Rewards:
    rewards = Rewards.of(REWARDS[:4], REWARDS[4:], correct=REWARDS, format=FORMAT)
    return Rewards(**{**vars(rewards), "tokens_N": np.array(LENGTHS)})


@pytest.mark.parametrize("name", PEERS)
def test_the_peers_functions_give_the_same(name: str) -> None:
    settings = {"weights": {"correct": 1.0, "format": 0.5}} if name == "gdpo" else {}
    assert OURS[name](two_groups(), **settings).tolist() == pytest.approx(
        [*map(float, PEERS[name].split())], abs=4e-6
    )


@pytest.mark.parametrize("name", OF_GROUPS)
def test_rewards_must_be_finite_and_fit_into_float32(name: str) -> None:
    assert np.isfinite(of_group([1e18, -1e18], name)).all()
    for rewards, says in (([1.0, math.nan], "finite"), ([math.inf, 0.0], "finite"), ([1e300, 0], "1e[+]18")):
        with pytest.raises(ValueError, match=says):
            of_group(rewards, name)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        *(([1.0], True), ([0.1] * 3, True), ([0.0, 1.0], False), ([1.0, 1.0 - 1e-6], False)),
        # equal but for rounding: of a sum, of float32, of large numbers, of zero
        ([0.1 + 0.2, 0.3] * 4, True),
        ([float(np.float32(0.35)), 0.35], True),
        ([-1e8, np.nextafter(-1e8, 0)], True),
        ([0.1 + 0.2 - 0.3, 0.0] * 4, True),
        ([0.0, 1e-9], False),
    ],
)
def test_a_uniform_group_has_exact_zeros(rewards: list[float], expected: bool) -> None:
    assert is_uniform(rewards) is expected
    assert [not any(of_group(rewards, name)) for name in OF_GROUPS] == [expected] * len(OF_GROUPS)


def test_gdpo_needs_the_names_of_its_weights() -> None:
    with pytest.raises(ConfigError, match="needs named rewards; this step has none"):
        advantages.gdpo(Rewards.of([1.0, 0.0]))
    with pytest.raises(ConfigError, match="needs named rewards: form; this step has correct, format"):
        advantages.gdpo(two_groups(), {"form": 1.0})
