"""Advantages by hand, against the peers' own functions, and what a user's function meets."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.algo import advantages
from bapo_megatron.algo.advantages import Rewards, build_advantage, check_advantage, is_uniform
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
@pytest.mark.parametrize("rewards", [[0.1] * 3, [1.0], [-7.3] * 16, [0.1 + 0.2, 0.3] * 4])
def test_equal_rewards_give_exact_zeros(name: str, rewards: list[float]) -> None:
    assert of_group(rewards, name) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_rewards_must_be_finite_and_fit_into_float32(name: str) -> None:
    assert np.isfinite(of_group([1e18, -1e18], name)).all()
    for rewards, says in (([1.0, math.nan], "finite"), ([math.inf, 0.0], "finite"), ([1e300, 0], "1e[+]18")):
        with pytest.raises(ValueError, match=says):
            of_group(rewards, name)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        *(([], True), ([1.0], True), ([0.5, 0.5], True), ([0.0, 1.0], False), ([1.0, 1.0, 0.0], False)),
        # equal but for rounding: of a sum, of float32, of large numbers
        ([0.1 + 0.2, 0.3] * 4, True),
        ([float(np.float32(0.35)), 0.35], True),
        ([-1e8, np.nextafter(-1e8, 0)], True),
        ([0.1 + 0.2 - 0.3, 0.0] * 4, True),
        *(([1.0, 1.0 - 1e-6], False), ([0.0, 1e-9], False), ([0.0, 0.0], True)),
    ],
)
def test_is_uniform(rewards: list[float], expected: bool) -> None:
    assert is_uniform(rewards) is expected
    assert is_uniform(np.array(rewards)) is expected


USERS = """
from bapo_megatron.algo.advantages import Rewards, each_group

@each_group
def shifted(group: Rewards, by: float = 1.0):
    return group.reward_N - group.reward_N.min() + by

def short(rewards):
    return rewards.reward_N[:1]

def infinite(rewards):
    return rewards.reward_N / 0.0 + float("inf")

def broken(rewards):
    return rewards.rewards

def by_format(rewards):
    return rewards.named["format"]

@each_group
def by_format_of_group(group):
    return group.named["format"] - group.named["format"].mean()

def summed(rewards):
    return sum(rewards.named.values())

def weighted(rewards, weights: dict):
    return sum(weights[name] * value_N for name, value_N in rewards.named.items())

def column(rewards):
    return rewards.reward_N[:, None]

def large(rewards):
    return rewards.reward_N * 1e39

def forgotten(rewards):
    rewards.reward_N - 1.0

@each_group
def short_of_group(group):
    return group.reward_N[:1]

@each_group
def mean_of_group(group):
    return group.reward_N.mean()

@each_group
def of_small_groups(group):
    return group.reward_N[:4]  # right for groups of up to 4
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_advantage.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_advantage", raising=False)


def users_config(name: str, **settings: object) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=f"users_advantage:{name}", advantage_settings=settings)


@pytest.mark.usefixtures("users")
def test_a_function_of_a_users_file() -> None:
    config = users_config("shifted", by=2.0)
    check_advantage(config, 8)
    assert build_advantage(config)(Rewards.of([1.0, 3.0], [5.0])).tolist() == [2.0, 4.0, 2.0]
    for name in ("by_format", "by_format_of_group", "summed"):
        check_advantage(users_config(name), 8)  # the names that a reward will give are not known before
    check_advantage(users_config("weighted", weights={"format": 2.0, "correct": 1.0}), 8)


SETTINGS = "algorithm.advantage_settings"
ONE_EACH, SHAPE = "must return one finite number for each of the", "returned float64 of shape"
OF_GROUP = f"{ONE_EACH} 8 responses of group 1 of 2"
TRIED = r"\(tried before the run, on 2 made-up groups of 8 responses\)"


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (AlgorithmConfig(advantage="gae"), "algorithm.advantage='gae' is unknown: give grpo, dr_grpo, rloo"),
        (users_config("shifted", of=2), f"{SETTINGS}.of=2: users_advantage:shifted has no such setting"),
        (users_config("shifted", by="a"), f"{SETTINGS}.by='a' must be a number"),
        (AlgorithmConfig(advantage_settings={"by": 1}), f"{SETTINGS}.by=1: .*leave it out"),
        (users_config("missing"), "has no function missing; .*shifted"),
        (users_config("short"), rf":short {ONE_EACH} 16 responses, but {SHAPE} \[1\] {TRIED}"),
        (users_config("column"), rf"16 responses, but {SHAPE} \[16, 1\]"),
        (users_config("infinite"), "16 responses, but returned numbers that are not finite in float32"),
        (users_config("large"), "numbers that are not finite in float32"),
        (users_config("broken"), f"users_advantage:broken failed with AttributeError.*; mend it {TRIED}"),
        (users_config("forgotten"), f"{ONE_EACH} 16 responses, but returned None {TRIED}"),
        (users_config("short_of_group"), rf"short_of_group {OF_GROUP}, but {SHAPE} \[1\] {TRIED}"),
        (users_config("mean_of_group"), f"mean_of_group {OF_GROUP}, but returned a single float64"),
        (users_config("of_small_groups"), rf"of_small_groups {OF_GROUP}, but {SHAPE} \[4\]"),
    ],
)
def test_mistakes_end_before_a_run(config: AlgorithmConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_advantage(config, 8)


def test_gdpo_needs_the_names_of_its_weights() -> None:
    with pytest.raises(ConfigError, match="needs named rewards; this step has none"):
        advantages.gdpo(Rewards.of([1.0, 0.0]))
    with pytest.raises(ConfigError, match="needs named rewards: form; this step has correct, format"):
        advantages.gdpo(two_groups(), {"form": 1.0})
