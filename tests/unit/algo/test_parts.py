"""What a user's advantage, mask and term meet: their settings, and mistakes that end before a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.algo.advantages import Rewards, build_advantage, check_advantage
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.masks import check_masks
from bapo_megatron.algo.terms import build_terms, check_terms
from bapo_megatron.config import AlgorithmConfig, PartConfig, RunConfig, load_recipe
from bapo_megatron.config.parts import part_problems
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from tests.support.pages import ROOT

USERS = """
from bapo_megatron.algo.advantages import each_group

# advantages

@each_group
def shifted(group, by: float = 1.0):
    return group.reward_N - group.reward_N.min() + by

def short(rewards):
    return rewards.reward_N[:1]

def infinite(rewards):
    return rewards.reward_N / 0.0 + float("inf")

def by_format(rewards):
    return rewards.named["format"]

def weighted(rewards, weights: dict):
    return sum(weights[name] * value_N for name, value_N in rewards.named.items())

@each_group
def of_small_groups(group):
    return group.reward_N[:4]  # right for groups of up to 4

# masks

def fewer(response, least: int = 2):
    return response.tokens < least

def counts(response):
    return response.tokens

def one(response):
    return response.log_ratio_N[:1] > 0

# terms

def square(stats, batch, target: float = 1.0):
    return (stats.entropy_T - target) ** 2

def lazy(stats, batch):
    return stats.entropy_T.detach()

def total(stats, batch):
    return stats.log_prob_T.sum()

def nothing(stats, batch):
    stats.log_prob_T  # a forgotten return

# any

def broken(given, *_):
    return given.of_no_such_name
"""


@pytest.fixture(autouse=True)
def _users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users", raising=False)


def advantage(name: str, **settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=name, advantage_settings=settings)


def mask(name: str, **settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(old_log_probs="trainer", masks=(PartConfig(name, settings),))


def term(name: str, **settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(terms=(PartConfig(name, settings),))


def check(algorithm: AlgorithmConfig) -> None:
    """What the preflight does with an algorithm's parts."""
    assert not list(part_problems(algorithm))
    check_advantage(algorithm, 8)
    check_masks(algorithm)
    check_terms(algorithm)


def test_an_advantage_of_a_users_file() -> None:
    config = advantage("users:shifted", by=2.0)
    check(config)
    assert build_advantage(config)(Rewards.of([1.0, 3.0], [5.0])).tolist() == [2.0, 4.0, 2.0]
    check(advantage("users:by_format"))  # the names that a reward will give are not known before
    check(advantage("users:weighted", weights={"format": 2.0, "correct": 1.0}))


def test_masks_of_ours_and_of_a_users_file() -> None:
    check(mask("rollout_rs", kind="seq_max_k2", high=1.0))
    for name in ("cut_responses", "icepop", "second_moment"):
        check(mask(name))
    check(mask("users:fewer", least=4))


def test_a_term_of_a_users_file() -> None:
    """(2 - 3)^2 + (4 - 3)^2 / 2."""
    config = term("users:square", target=3.0)
    check(config)
    weight_T = torch.tensor([1.0, 0.5, 0.0])
    batch = MicroBatch.of((0, 3), ((0, 0, 3),), 1, mask_T=(weight_T > 0).float(), weight_T=weight_T)
    stats = TokenStats(torch.zeros(3), torch.tensor([2.0, 4.0, np.nan]))
    assert float(build_terms(config)["square"](stats, batch)) == pytest.approx(1.5)


def test_the_recipe_of_a_method_of_ones_own_passes_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    recipe = ROOT / "recipes/methods_7b_8k/r1_distill_qwen_7b_8k_own_method.py"
    algorithm = load_recipe(recipe, RunConfig).algorithm
    build_loss(algorithm)
    check(algorithm)
    assert build_advantage(algorithm)(Rewards.of([1.0, 0.0, 0.0])).tolist() == [1.0, -0.5, -0.5]


ONE_EACH, SHAPE = "must return one finite number for each of the", "returned float64 of shape"
OF_GROUP = f"{ONE_EACH} 8 responses of group 1 of 2"
GROUPS = r"\(tried before the run, on 2 made-up groups of 8 responses\)$"
MASK = r"^algorithm.masks\[0\]=users"
RESPONSE = r"\(tried before the run, on a made-up response of 3 tokens\)$"
TERM = r"^algorithm.terms\[0\]=users"
COSTS = r"must return a tensor of shape \[2\], the cost of each token, but"
PACK = r"\(tried before the run, on a made-up pack of 2 tokens\)$"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (advantage("users:shifted", of=2), "advantage_settings.of=2: users:shifted has no such setting"),
        (advantage("grpo", by=1), "algorithm.advantage_settings.by=1: .*its settings: none"),
        (advantage("users:short"), rf":short {ONE_EACH} 16 responses, but {SHAPE} \[1\] {GROUPS}"),
        (advantage("users:infinite"), "16 responses, but returned numbers that are not finite in float32"),
        (advantage("users:broken"), f"users:broken failed with AttributeError.*; mend it {GROUPS}"),
        (advantage("users:of_small_groups"), rf"of_small_groups {OF_GROUP}, but {SHAPE} \[4\] {GROUPS}"),
        (mask("rollout_rs", kind="token_k9", high=1.0), r"settings.kind='token_k9' must be one of token_k1"),
        (mask("rollout_rs", kind="token_k1", high=1.0), "kind=token_k1 needs low"),
        (mask("users:counts"), rf"{MASK}:counts must return True or False, .* returned a single int64"),
        (mask("users:one"), rf"{MASK}:one .* 3 trained .* returned bool of shape \[1\] {RESPONSE}"),
        (term("users:lazy"), f"{TERM}:lazy has no gradient: compute it from stats"),
        (term("users:total"), rf"{TERM}:total {COSTS} returned a single float32 {PACK}"),
        (term("users:nothing"), rf"{TERM}:nothing {COSTS} returned None {PACK}"),
    ],
)
def test_mistakes_end_before_a_run(config: AlgorithmConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (advantage("gae"), "algorithm.advantage='gae' is unknown: give grpo, dr_grpo, rloo"),
        (mask("overlong"), "algorithm.masks[0]='overlong' is unknown: give cut_responses, icepop"),
        (term("entropy"), "algorithm.terms[0]='entropy' is unknown: give entropy_bonus"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(config: AlgorithmConfig, says: str) -> None:
    [problem] = part_problems(config)
    assert problem.startswith(says)
