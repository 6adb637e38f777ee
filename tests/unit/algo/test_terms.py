"""Terms of the loss: the entropy bonus by hand, its metric, and what a user's term meets."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.algo.advantages import Rewards, build_advantage, check_advantage
from bapo_megatron.algo.bapo import fixed
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.masks import check_masks
from bapo_megatron.algo.terms import build_terms, check_terms
from bapo_megatron.config import (
    AlgorithmConfig,
    DistillationConfig,
    PartConfig,
    ReferenceKlConfig,
    RunConfig,
    load_recipe,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.trainer.update_loss import UpdateLoss
from tests.support.pages import ROOT

BATCH = MicroBatch.of(
    (0, 3),
    ((0, 0, 3),),
    1,
    mask_T=torch.tensor([1.0, 1.0, 0.0]),
    weight_T=torch.tensor([1.0, 0.5, 0.0]),
    advantage_T=torch.tensor([1.0, -1.0, 0.0]),
)


def stats() -> TokenStats:
    entropy_T = torch.tensor([2.0, 4.0, float("nan")], requires_grad=True)
    return TokenStats(torch.zeros(3, requires_grad=True), entropy_T)


def terms(name: str, **settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(bounds=fixed(0.8, 1.2), terms=(PartConfig(name, settings),))


def test_the_entropy_bonus_by_hand() -> None:
    """Entropies 2 and 4 of weights 1 and 1/2: -0.1 * 4. The loss of the policy is -(1 - 0.5)."""
    update = UpdateLoss(terms("entropy_bonus", coefficient=0.1))
    plain = UpdateLoss(AlgorithmConfig(bounds=fixed(0.8, 1.2)))
    found, rest = stats(), stats()
    sums, without = (
        one.objective.token_fn(one.objective.loss.search.known, 0)(each, BATCH)  # type: ignore[union-attr]
        for one, each in ((update, found), (plain, rest))
    )
    assert float(sums[0]) == pytest.approx(float(without[0]) - 0.4)
    sums[0].backward()
    without[0].backward()
    assert found.entropy_T.grad is not None
    assert found.entropy_T.grad.tolist() == pytest.approx([-0.1, -0.05, 0.0])
    assert rest.entropy_T.grad is None
    assert torch.equal(found.log_prob_T.grad, rest.log_prob_T.grad)  # type: ignore[arg-type]
    metrics = update.objective.metrics(sums.detach(), None)
    assert metrics["terms/entropy_bonus"] == pytest.approx(-0.2)  # of two tokens
    assert "terms/entropy_bonus" in update.objective.metric_names()


def test_the_kl_terms_are_added_beside_it() -> None:
    """k1 of 1 to the reference and of 2 to the teacher, of a token of weight 1 and one of 1/2."""
    config = replace(
        terms("entropy_bonus", coefficient=0.1),
        reference_kl=ReferenceKlConfig(0.1, "k1"),
        distillation=DistillationConfig(1.0, "k1"),
    )
    columns = {"reference_log_prob_T": torch.full((3,), -1.0), "teacher_log_prob_T": torch.full((3,), -2.0)}
    objective = UpdateLoss(config).objective
    sums = objective.token_fn(objective.loss.search.known, 0)(stats(), replace(BATCH, **columns))  # type: ignore[union-attr]
    assert float(sums[0]) == pytest.approx(-0.5 - 0.4 + 1.5 * 0.1 + 1.5 * 2)


def test_the_recipe_of_a_method_of_ones_own_passes_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    recipe = ROOT / "recipes/methods_7b_8k/r1_distill_qwen_7b_8k_own_method.py"
    algorithm = load_recipe(recipe, RunConfig).algorithm
    for check in (build_loss, check_masks, check_terms):
        check(algorithm)
    check_advantage(algorithm, 8)
    assert build_advantage(algorithm)(Rewards.of([1.0, 0.0, 0.0])).tolist() == [1.0, -0.5, -0.5]


USERS = """
def lazy(stats, batch):
    return stats.entropy_T.detach()

def total(stats, batch):
    return stats.log_prob_T.sum()

def missing(stats, batch):
    return stats.value_T

def forgotten(stats, batch):
    stats.entropy_T * 2

def number(stats, batch):
    return 0.5

def square(stats, batch, target: float = 1.0):
    return (stats.entropy_T - target) ** 2
"""


TERM = r"^algorithm.terms\[0\]=users_term"
COSTS = r"must return a tensor of shape \[2\], the cost of each token, but"
TRIED = r"\(tried before the run, on a made-up pack of 2 tokens\)$"


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_term.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_term", raising=False)


@pytest.mark.usefixtures("users")
def test_a_term_of_a_users_file() -> None:
    """(2 - 3)^2 + (4 - 3)^2 / 2."""
    config = terms("users_term:square", target=3.0)
    check_terms(config)
    assert float(build_terms(config)["square"](stats(), BATCH)) == pytest.approx(1.5)


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (terms("entropy"), r"algorithm.terms\[0\]='entropy' is unknown: give entropy_bonus"),
        (terms("entropy_bonus", coefficient=-1.0), "settings.coefficient=-1.0 must be above 0"),
        (terms("entropy_bonus", beta=1.0), "settings.beta=1.0: entropy_bonus has .*: coefficient: float"),
        (terms("users_term:lazy"), rf"{TERM}:lazy has no gradient: compute it from stats"),
        (terms("users_term:total"), rf"{TERM}:total {COSTS} returned a single float32 {TRIED}"),
        (terms("users_term:forgotten"), rf"{TERM}:forgotten {COSTS} returned None {TRIED}"),
        (terms("users_term:number"), rf"{TERM}:number {COSTS} returned a value of type float {TRIED}"),
        (terms("users_term:missing"), rf"{TERM}:missing failed with AttributeError.*; mend it {TRIED}"),
    ],
)
def test_mistakes_end_before_a_run(config: AlgorithmConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_terms(config)
