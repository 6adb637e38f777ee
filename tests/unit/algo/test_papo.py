"""PAPO: the polarity against measured changes of entropy, the weights by hand, the update's wiring."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algo.bapo import balanced, grpo
from bapo_megatron.algo.bounds import search_bounds
from bapo_megatron.algo.losses.clip import contribution_fn
from bapo_megatron.algo.papo import polarity, reweighted
from bapo_megatron.algo.papo_schedule import BranchWeights, PapoConfig, PapoSchedule
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.trainer.update_loss import UpdateLoss
from tests.support.bapo_objective import loss_fn
from tests.support.small_steps import NotedPolicy
from tests.unit.algo.test_objective import pack

LN = math.log


def entropy_of(logits_V: Tensor) -> Tensor:
    log_prob_V = logits_V.log_softmax(0)
    return -(log_prob_V.exp() * log_prob_V).sum()


def distributions(count: int, size: int = 8) -> list[Tensor]:
    """Logits of softmax policies, from flat to nearly decided."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0.2, 4.0, count, dtype=torch.float64)
    return [scale * torch.randn(size, generator=generator, dtype=torch.float64) for scale in scales]


@pytest.mark.parametrize("advantage", [1.0, -0.7])
def test_polarity_is_the_sign_of_the_measured_change_of_entropy(advantage: float) -> None:
    """A natural-gradient step on log pi(y): z_y += step A / pi(y). Its effect: -A (log pi(y) + H) step."""
    step = 1e-6
    for logits_V in distributions(30):
        log_prob_V, before = logits_V.log_softmax(0), entropy_of(logits_V)
        for y in range(len(logits_V)):
            moved_V = logits_V.clone()
            moved_V[y] += step * advantage / log_prob_V[y].exp()
            predicted = -advantage * (log_prob_V[y] + before)
            measured = (entropy_of(moved_V) - before) / step
            # Second order: step / pi(y) at most, times a curvature of a few.
            assert float(measured) == pytest.approx(
                float(predicted), abs=20 * step / float(log_prob_V[y].exp()) ** 2
            )
            if abs(predicted) > 1e-3 and log_prob_V[y] > -4:
                sign = polarity(log_prob_V[y, None], before[None], torch.tensor([advantage]))
                assert float(sign) == math.copysign(1.0, float(measured))


def test_polarity_of_the_four_kinds_of_tokens() -> None:
    """pi = 1/2 and 1/4 at H = 1: log pi + H is 0.31 and -0.39. Table 4 of the paper, row by row. A token of
    which the policy is certain is likely, whatever the rounding."""
    log_prob_T = torch.tensor([LN(1 / 2), LN(1 / 2), LN(1 / 4), LN(1 / 4), -1.0, 0.0, -1e-6, -3e-7])
    entropy_T = torch.tensor([1.0] * 5 + [0.0, 9e-7, 0.0])
    advantage_T = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0, 1.0, 1.0])
    assert polarity(log_prob_T, entropy_T, advantage_T).tolist() == [-1, 1, 1, -1, 0, -1, -1, -1]


def test_weights_follow_the_entropy_by_hand() -> None:
    """Target 1.0 from the first update, band 0.5, strength 0.4, memory 0.75.

    Entropies 1.0, 0.6: mean 0.9, phase 0.1 / 0.5 = 0.2, change 0.08. Then 0.0: mean 0.675, phase 0.65, change
    0.26. Then 8.0: mean 2.50625, phase -1 (clipped).
    """
    control = PapoSchedule(PapoConfig(True, strength=0.4, band=0.5, memory=0.75))
    assert control.weights == (1.0, 1.0)
    control.observe(1.0)
    assert control.weights == (1.0, 1.0)
    control.observe(0.6)
    assert control.phase == pytest.approx(0.2)
    assert control.weights == pytest.approx((1.08, 0.92))
    control.observe(0.0)
    assert control.weights == pytest.approx((1.26, 0.74))
    control.observe(8.0)
    assert control.weights == pytest.approx((0.6, 1.4))
    certain = PapoSchedule(PapoConfig(True))  # a policy that was certain in its first update
    for entropy in (-1e-9, 3.0):
        certain.observe(entropy)
    assert certain.phase == 0.0


def test_a_continued_control_goes_on_where_it_was() -> None:
    first = PapoSchedule(PapoConfig(True))
    assert first.state() is None
    first.observe(2.0)
    first.observe(1.0)
    second = PapoSchedule(PapoConfig(True))
    second.load_state(first.state())
    assert second.weights == first.weights
    held = PapoSchedule(PapoConfig(True, target_entropy=7.0))
    held.load_state(first.state())
    assert held.phase == 1.0


# Ratio 1 throughout; pi = 1/2 is likely at H = 1, pi = 1/4 is not. Advantages of all four kinds.
BATCH = pack([1.0, -1.0, 2.0, -2.0], [LN(1 / 2), LN(1 / 2), LN(1 / 4), LN(1 / 4)], [1.0] * 4, [7] * 4)


ALIKE = TokenStats(BATCH.old_log_prob_T, torch.ones(4))


def test_advantages_of_both_branches_by_hand() -> None:
    """Weights 3 (expanding) and 0.5 (contracting): A = 0.5, -3, 6, -1; loss -(0.5 - 3 + 6 - 1).

    No gradient passes through the polarity: d loss / d log pi = -r A'.
    """
    seen: list[Tensor] = []

    def keep(_stats: TokenStats, batch: MicroBatch) -> Tensor:
        seen.append(batch.advantage_T)
        return torch.zeros(1)

    reweighted(keep, BranchWeights(3.0, 0.5))(ALIKE, BATCH)
    assert seen[0].tolist() == [0.5, -3.0, 6.0, -1.0]
    config = grpo()
    loss = loss_fn(search_bounds(contribution_fn(config)(ALIKE, BATCH), config), config, 7)
    log_prob_T = BATCH.old_log_prob_T.clone().requires_grad_()
    found = reweighted(loss, BranchWeights(3.0, 0.5))(TokenStats(log_prob_T, torch.ones(4)), BATCH)[0]
    found.backward()
    assert found.item() == -2.5
    assert log_prob_T.grad.tolist() == [-0.5, 3.0, -6.0, 1.0]


def algorithm(**polarity: Any) -> AlgorithmConfig:
    settings = PapoConfig(True, strength=0.5, band=0.5, memory=0.0, target_entropy=4.0, **polarity)
    return AlgorithmConfig(bounds=dataclasses.replace(balanced(), target=0.6), polarity=settings)


def test_search_and_loss_see_the_weights_of_the_updates_before() -> None:
    """Entropy 1 against a target of 4: phase 1, weights 1.5 and 0.5 from the second update on.

    A = (1, -1, 2, -2): share 1/2. Then (0.5, -1.5, 3, -1): P = 3.5 of 6, which is 0.583, and 0.5 before.
    """
    policy, clipping = NotedPolicy(0.0), UpdateLoss(algorithm())
    shares, losses, logs = [], [], []
    for _ in range(2):
        loss = clipping.loss(policy, [BATCH], on_policy=True)  # type: ignore[arg-type]
        sums = loss(ALIKE, BATCH)  # type: ignore[operator]
        logs.append(clipping.observe(sums))
        shares.append(clipping.found.contribution)
        losses.append(float(sums[0]))
    assert policy.calls == ["token_sums", "token_sums"]  # a known ratio does not tell the entropies
    assert shares == pytest.approx([0.5, 3.5 / 6])
    assert losses == pytest.approx([0.0, -1.0])
    assert [*logs[0].values()] == [0.0, 1.0, 1.0]  # the phase and both weights
    assert logs[1]["polarity/expanding_weight"] == 1.5
    resumed = UpdateLoss(algorithm())
    resumed.load_state(clipping.state())
    assert resumed.observe(torch.zeros(2000))["polarity/contracting_weight"] == 0.5


def test_off_means_untouched() -> None:
    """The very functions and passes of before, and nothing to keep."""
    config = AlgorithmConfig(bounds=balanced())
    policy, clipping = NotedPolicy(0.0), UpdateLoss(config)
    loss = clipping.loss(policy, [BATCH], on_policy=True)  # type: ignore[arg-type]
    assert policy.calls == ["old_sums"]
    sums = loss(ALIKE, BATCH)  # type: ignore[operator]
    assert torch.equal(sums, loss_fn(clipping.found, balanced(), policy.version)(ALIKE, BATCH))
    assert clipping.observe(sums) == {}
    assert clipping.state() is None
