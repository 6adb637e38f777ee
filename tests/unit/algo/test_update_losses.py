"""Losses of an update against literal loops, autograd and numbers by hand; however the update is split."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algo.losses import Loss, LossTerms, build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.sequences import PerSequence, sequence_means, sequence_sums
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from tests.unit.algo.test_every_loss import found_of, update


def loss_of(name: str, **settings: Any) -> Loss:
    """A registered loss with settings of its constructor."""
    return type(build_loss(AlgorithmConfig(loss=name)))(AlgorithmConfig(loss=name), **settings)


def log_ratio(stats: TokenStats, batch: MicroBatch, t: int) -> float:
    return float(stats.log_prob_T[t] - batch.old_log_prob_T[t])


def algorithm_1(stats: TokenStats, batch: MicroBatch, tau: float) -> set[int]:
    """The tokens that M2PO's Algorithm 1 masks, one after the other."""
    moments = {}
    for t in range(len(batch.mask_T)):
        if batch.mask_T[t]:
            log_r, advantage = log_ratio(stats, batch, t), float(batch.advantage_T[t])
            if (advantage > 0 and log_r > 0) or (advantage < 0 and log_r < 0):
                moments[t] = log_r * log_r
    masked = set()
    while moments and sum(moments.values()) / len(moments) > tau:
        largest = max(moments, key=lambda t: moments[t])
        masked.add(largest)
        del moments[largest]
    return masked


def derivative(loss: Loss, stats: TokenStats, batch: MicroBatch, found: Any) -> Tensor:
    log_prob_T = stats.log_prob_T.clone().requires_grad_()
    loss.terms(TokenStats(log_prob_T, stats.entropy_T), batch, found).loss.backward()
    assert log_prob_T.grad is not None
    return log_prob_T.grad


def test_sums_by_sequence_by_hand() -> None:
    """Sequence 0: log r 1 and 3; sequence 1: none; sequence 2: -2, and a masked token that holds nan."""
    batch = MicroBatch.of(
        (0, 4),
        sequences=3,
        mask_T=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        sequence_T=torch.tensor([0, 2, 0, 2]),
        old_log_prob_T=torch.tensor([-1.0, -1.0, -4.0, math.nan]),
    )
    stats = TokenStats(torch.tensor([0.0, -3.0, -1.0, math.nan]), torch.zeros(4))
    totals = sequence_sums(stats, batch)
    assert totals.tolist() == [4.0, 0.0, -2.0, 2.0, 0.0, 1.0]
    means = PerSequence(sequence_means(totals))
    assert means.values_S.tolist() == [2.0, 0.0, -2.0]
    assert means.of_tokens(batch).tolist() == [2.0, -2.0, 2.0, 0.0]


def responses(log_ratios: list[float], sequence: list[int], advantages: list[float]) -> Any:
    """Tokens of weight 1 with these log-ratios."""
    count = len(log_ratios)
    batch = MicroBatch.of(
        (0, count),
        sequences=max(sequence) + 1,
        mask_T=torch.ones(count),
        weight_T=torch.ones(count),
        sequence_T=torch.tensor(sequence),
        advantage_T=torch.tensor(advantages),
        old_log_prob_T=torch.full((count,), -1.0),
    )
    return TokenStats(torch.tensor(log_ratios, dtype=torch.float64) - 1.0, torch.zeros(count)), batch


def terms_of(loss: Loss, *tokens: Any) -> LossTerms:
    stats, batch = responses(*tokens)
    return loss.terms(stats, batch, found_of(loss, (stats, batch)))


def test_gspo_by_hand() -> None:
    """Bounds 0.5 and 2 about ratios sqrt(2 * 1/2) = 1, 4 (clipped for A > 0) and 1/4 (alive for A > 0).

    Loss: -(2 * 1 * 3 + 2 * 1 + 1/4 * 1).
    """
    ln2 = math.log(2)
    loss = loss_of("gspo", clip_low=0.5, clip_high=1.0)
    ratios, advantages = [ln2, -ln2, 2 * ln2, -2 * ln2], [3.0, 3.0, 1.0, 1.0]
    for sign, value, factors in ((1, -8.25, [1, 1, 0, 0.25]), (-1, 10.5, [1, 1, 4, 0])):
        terms = terms_of(loss, ratios, [0, 0, 1, 2], [sign * one for one in advantages])
        assert float(terms.loss) == pytest.approx(value)
        assert terms.gradient_T.tolist() == pytest.approx(factors)
        assert terms.clipped_T.tolist() == [factor == 0 for factor in factors]
    # The paper's bounds are 1 - 3e-4 and 1 + 4e-4, here with 1 % of their widths to either side.
    means = [math.log1p(value) for value in (3.96e-4, 4.04e-4, -2.97e-4, -3.03e-4)]
    terms = terms_of(loss_of("gspo"), means, [0, 1, 2, 3], [1.0, 1.0, -1.0, -1.0])
    assert terms.clipped_T.tolist() == [False, True, False, True]


def test_vespo_by_hand() -> None:
    """W = 2 of two tokens at sqrt 2 each, and W = 1/2.

    Weights for A > 0: 4 e^-3 and (1/4) e^(3/2), for A < 0: 8 e^-2 and (1/8) e. At W = 1 it is 1, far away 0.
    """
    half, loss = math.log(2) / 2, loss_of("vespo")
    terms = terms_of(loss, [half, half, -2 * half], [0, 0, 1], [1.0] * 3)
    above, below = 4 * math.exp(-3), 0.25 * math.exp(1.5)
    assert terms.gradient_T.tolist() == pytest.approx([above, above, below])
    assert float(terms.loss) == pytest.approx(-(2 * above * (half - 1) + below * (-2 * half - 1)))
    assert not bool(terms.clipped_T.any())
    terms = terms_of(loss, [half, half, -2 * half], [0, 0, 1], [-1.0] * 3)
    assert terms.gradient_T.tolist() == pytest.approx([8 * math.exp(-2)] * 2 + [math.e / 8])
    terms = terms_of(loss, [0.0, 700.0, -700.0], [0, 1, 2], [1.0, 1.0, -1.0])
    assert terms.gradient_T.tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-20)
    assert math.isfinite(float(terms.loss))


def test_p3o_by_hand() -> None:
    """Ratios 2, 1, 1/2, 4 and 5/4: ESS = (35/4)^2 / (5 * 365/16) = 49/73, which caps all but 1/2.

    The last token is masked. The loss and its derivatives are what the authors' code has for these tokens
    (FeynRL 4f7eafe, ``P3O.compute_policy_loss``), which adds 1e-8 to the sum of squares.
    """
    ratios, olds = [2.0, 1.0, 0.5, 4.0, 1.25, 9.0], [-2.0, -0.5, -1.0, -3.0, -1.5, -9.0]
    stats, batch = responses([0.0] * 6, [0, 0, 0, 1, 1, 1], [1.0, 1.0, 1.0, -0.5, -0.5, -0.5])
    old_T = torch.tensor(olds, dtype=torch.float64)
    mask_T = torch.tensor([1.0] * 5 + [0.0])
    batch = dataclasses.replace(batch, mask_T=mask_T, weight_T=mask_T.clone(), old_log_prob_T=old_T)
    stats = TokenStats(old_T + torch.tensor(ratios).double().log(), stats.entropy_T)
    loss = build_loss(AlgorithmConfig(loss="p3o"))
    found = found_of(loss, (stats, batch))
    assert found == pytest.approx(49 / 73, rel=1e-14)
    terms = loss.terms(stats, batch, found)
    assert terms.gradient_T.tolist() == pytest.approx([49 / 73, 49 / 73, 0.5, 49 / 73, 49 / 73, 0])
    assert terms.clipped_T.tolist() == [True, True, False, True, True, False]
    assert float(terms.loss) == pytest.approx(1.4704575159301685, rel=1e-7)
    theirs = [-0.50684931874, -0.67123287916, -0.82876712081, 0.58219178021, 0.40136986971, 0.0]
    assert derivative(loss, stats, batch, found).tolist() == pytest.approx(theirs, rel=1e-7)
    by_hand = [-49 / 73 + 12 / 73, -49 / 73, -0.5 - 24 / 73, 24.5 / 73 + 18 / 73, 24.5 / 73 + 4.8 / 73, 0.0]
    assert derivative(loss, stats, batch, found).tolist() == pytest.approx(by_hand, rel=1e-12)
    metrics = Objective(loss).metrics(Objective(loss).token_fn(found, 6)(stats, batch), found)
    assert metrics["policy/ess"] == pytest.approx(49 / 73)
    assert metrics["p3o/behavior_kl"] == pytest.approx(0.2318875789642334, rel=1e-6)


def test_p3o_needs_the_ratio_to_the_policy_that_sampled() -> None:
    with pytest.raises(ConfigError, match=r"old_log_probs=trainer.*set algorithm\.old_log_probs=rollout"):
        build_loss(AlgorithmConfig(loss="p3o", old_log_probs="trainer"))


def test_m2po_by_hand() -> None:
    """tau 0.3 over squares 1, 4 (A > 0) and 0.25 (A < 0): means 1.75, then 0.625, then 0.25.

    So both tokens with A > 0 and r > 1 are masked. log r = -3 with A > 0 and 3 with A < 0 are not candidates.
    Loss: -(-exp(-0.5) + exp(-3) - exp(3)); all five tokens stay in the count.
    """
    loss = loss_of("m2po", tau=0.3)
    stats, batch = responses([1.0, 2.0, -0.5, -3.0, 3.0], [0] * 5, [1.0, 1.0, -1.0, 1.0, -1.0])
    found = found_of(loss, (stats, batch))
    assert (found.moment, found.kept) == pytest.approx((1.75, 0.25))
    assert 0.995 <= found.threshold <= 1.0
    terms = loss.terms(stats, batch, found)
    assert float(terms.loss) == pytest.approx(math.exp(-0.5) - math.exp(-3) + math.exp(3))
    assert terms.clipped_T.tolist() == [True, True, False, False, False]
    assert terms.gradient_T.tolist() == pytest.approx([0, 0, math.exp(-0.5), math.exp(-3), math.exp(3)])
    objective = Objective(loss)
    metrics = objective.metrics(objective.token_fn(found, 6)(stats, batch), found)
    assert metrics["policy/tokens"] == 5.0
    assert metrics["policy/loss"] == pytest.approx(float(terms.loss) / 5)
    assert metrics["bapo/clip_fraction_high"] == pytest.approx(2 / 5)
    assert metrics["m2po/second_moment_kept"] == pytest.approx(0.25)
    within = Objective(loss_of("m2po", tau=2.0))  # nothing is masked
    found = found_of(within.loss, (stats, batch))
    assert found.threshold == math.inf
    assert within.metrics(within.token_fn(found, 6)(stats, batch), found)["m2po/threshold"] is None


@pytest.mark.parametrize("seed", range(8))
def test_m2po_masks_what_algorithm_1_does_and_at_most_the_rest_of_a_bin(seed: int) -> None:
    stats, batch = update(seed)
    loss = loss_of("m2po", tau=0.001)
    found = found_of(loss, (stats, batch))
    ours = set(loss.terms(stats, batch, found).clipped_T.nonzero().flatten().tolist())
    theirs = algorithm_1(stats, batch, 0.001)
    assert theirs
    assert theirs <= ours
    last = min(abs(log_ratio(stats, batch, t)) for t in theirs)
    assert all(abs(log_ratio(stats, batch, t)) > last / 1.005 for t in ours - theirs)
    assert found.kept <= 0.001
