"""Terms of the loss: the entropy bonus by hand, its metric, and beside the KL terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bapo_megatron.algo.bapo import fixed
from bapo_megatron.config import AlgorithmConfig, DistillationConfig, PartConfig, ReferenceKlConfig
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.trainer.update_loss import UpdateLoss

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
