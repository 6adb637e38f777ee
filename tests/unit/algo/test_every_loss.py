"""What holds for every registered loss: factor and gradient, masked tokens, one answer, no host waits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.algo.losses import LOSSES, Loss, build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from tests.support.host_waits import HostWaits

TOKENS = 900
SEQUENCES = 30

pytestmark = pytest.mark.parametrize("name", sorted(LOSSES))


def update(seed: int, rubbish: float = math.nan) -> tuple[TokenStats, MicroBatch]:
    """An update of 30 responses in one pack. A fifth of the tokens is masked: weight 0, else ``rubbish``.

    The policy has drifted by 0.01 nats, and by 0.7 at one token in ten; every tenth advantage is 0.
    """
    rng = np.random.default_rng(seed)
    masked_T = torch.tensor(rng.random(TOKENS) < 0.2)
    old_T = torch.tensor(-rng.exponential(1.0, TOKENS) - 0.05)
    drift = rng.normal(0, 0.01, TOKENS) + rng.normal(0, 0.7, TOKENS) * (rng.random(TOKENS) < 0.1)
    sequence_T = torch.tensor(np.sort(rng.integers(0, SEQUENCES, TOKENS)))
    advantage_S = rng.choice([-1.5, -0.5, 0.0, 0.7, 2.0], SEQUENCES, p=[0.2, 0.25, 0.1, 0.25, 0.2])

    def column(value_T: Tensor) -> Tensor:
        return torch.where(masked_T, rubbish, value_T).float()

    batch = MicroBatch.of(
        (0, TOKENS),
        sequences=SEQUENCES,
        mask_T=(~masked_T).float(),
        weight_T=torch.tensor(rng.choice([0.5, 1.0, 2.0], TOKENS)).float() * ~masked_T,
        advantage_T=column(torch.tensor(advantage_S)[sequence_T]),
        rollout_log_prob_T=column(old_T + 0.01),
        old_log_prob_T=column(old_T),
        version_T=torch.tensor(rng.integers(0, 6, TOKENS), dtype=torch.int32),
        sequence_T=torch.where(masked_T, -1, sequence_T),
    )
    log_prob_T = column((old_T + torch.tensor(drift)).clamp(max=-1e-3))
    return TokenStats(log_prob_T, column(torch.tensor(rng.exponential(0.8, TOKENS)))), batch


def found_of(loss: Loss, *parts: tuple[TokenStats, MicroBatch]) -> Any:
    """What the search of a loss finds, from the sums of all parts; None without one."""
    if loss.search is None:
        return None
    measured = torch.stack([loss.search.measure(*part) for part in parts]).sum(0)
    return loss.search.find(measured)


def build(name: str) -> Loss:
    # One search an update: these packs do not know the lengths of their sequences.
    return build_loss(AlgorithmConfig(BoundsConfig(), loss=name))


@pytest.mark.parametrize("seed", range(3))
def test_the_factor_is_that_of_the_gradient(name: str, seed: int) -> None:
    """d loss / d log pi = -weight A g at the tokens that count, and nothing elsewhere."""
    stats, batch = update(seed)
    loss = build(name)
    log_prob_T = stats.log_prob_T.clone().requires_grad_()
    terms = loss.terms(TokenStats(log_prob_T, stats.entropy_T), batch, found_of(loss, (stats, batch)))
    terms.loss.backward()
    assert log_prob_T.grad is not None
    said_T = torch.where(batch.mask_T != 0, -batch.weight_T * batch.advantage_T * terms.gradient_T, 0.0)
    if name == "p3o":  # its pull towards pi_old is not a part of the factor
        log_ratio_T = stats.log_prob_T.double() - batch.old_log_prob_T
        pull_T = batch.weight_T * -torch.expm1(-log_ratio_T)
        said_T += (1 - found_of(loss, (stats, batch))) * torch.where(batch.mask_T != 0, pull_T, 0.0)
    torch.testing.assert_close(log_prob_T.grad.double(), said_T, rtol=1e-5, atol=1e-7)
    assert int((said_T != 0).sum()) > TOKENS // 4
    assert terms.loss.dtype == torch.float64
    assert not terms.gradient_T.requires_grad


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 7.0])
def test_masked_tokens_count_nowhere(name: str, rubbish: float) -> None:
    """Whatever they hold, loss, gradient, metrics and what is found are those of zeros in their place."""

    def told(rubbish: float) -> tuple[Tensor, Tensor]:
        stats, batch = update(4, rubbish)
        objective = Objective(build(name))
        log_prob_T = stats.log_prob_T.clone().requires_grad_()
        found = found_of(objective.loss, (stats, batch))
        vector = objective.token_fn(found, 6)(TokenStats(log_prob_T, stats.entropy_T), batch)
        vector[0].backward()
        assert log_prob_T.grad is not None
        return vector.detach(), log_prob_T.grad

    for ours, expected in zip(told(rubbish), told(0.0), strict=True):
        assert bool(ours.isfinite().all())
        assert torch.equal(ours, expected)


def test_one_answer_however_the_update_is_split(name: str) -> None:
    """Packs, chunks and context-parallel shares: any split of the tokens gives the same sums and metrics."""
    stats, batch = update(5)
    batch = dataclasses.replace(batch, sources=(0, 1, -1) * (SEQUENCES // 3))
    objective = Objective(build(name), ("sums", "words"))
    found = found_of(objective.loss, (stats, batch))
    whole = objective.token_fn(found, 5)(stats, batch)
    order = torch.tensor(np.random.default_rng(0).permutation(TOKENS))
    shares = [torch.arange(rank, TOKENS, 3) for rank in range(3)]
    for split in (torch.arange(TOKENS).split(77), order.split(300), shares):
        parts = [(TokenStats(*(column[i] for column in stats)), batch.take(i)) for i in split]
        total = torch.stack(
            [objective.token_fn(found_of(objective.loss, *parts), 5)(*part) for part in parts]
        )
        torch.testing.assert_close(total.sum(0), whole, rtol=1e-9, atol=1e-9)
    metrics = objective.metrics(whole, found)
    assert objective.metrics(0 * whole, found).keys() == metrics.keys()


def test_an_update_without_a_token_is_nothing(name: str) -> None:
    """What is left where every response was rejected, or a rank has none: a dummy pack."""
    objective = Objective(build(name))
    stats, batch = TokenStats(torch.full((2,), -1.0), torch.ones(2)), MicroBatch.of((0, 2))
    for version in (0, 6):  # padding has version 0, as the first step's policy
        found = found_of(objective.loss, (stats, batch))
        assert not objective.token_fn(found, version)(stats, batch).any()


def test_on_policy_it_is_reinforce(name: str) -> None:
    """At r = 1 every loss has the gradient of REINFORCE: the factor is 1 wherever the advantage is not 0."""
    stats, batch = update(6)
    batch = dataclasses.replace(
        batch, old_log_prob_T=stats.log_prob_T, rollout_log_prob_T=stats.log_prob_T.clone()
    )
    loss = build(name)
    terms = loss.terms(stats, batch, found_of(loss, (stats, batch)))
    moved_T = (batch.mask_T != 0) & (batch.advantage_T != 0)
    torch.testing.assert_close(terms.gradient_T[moved_T], torch.ones(int(moved_T.sum())).double())
    assert not bool(terms.clipped_T[moved_T].any())


def test_a_nan_in_a_token_of_the_loss_reaches_the_result(name: str) -> None:
    """A nan in a token that counts must reach the loss: it says that the policy is broken."""
    stats, batch = update(7)
    place = int((batch.mask_T * batch.advantage_T.nan_to_num().abs()).argmax())
    broken_T = stats.log_prob_T.clone()
    broken_T[place] = math.nan
    stats = TokenStats(broken_T, stats.entropy_T)
    loss = build(name)
    found = found_of(loss, update(7))  # a search of broken tokens may fail in its own way
    assert math.isnan(float(loss.terms(stats, batch, found).loss))


def test_the_host_does_not_wait_for_a_gpu(name: str) -> None:
    stats, batch = update(8)
    objective = Objective(build(name))
    found = found_of(objective.loss, (stats, batch))
    objective.token_fn(found, 5)(stats, batch)  # constants go to the device once
    with HostWaits() as counted:
        objective.token_fn(found, 5)(stats, batch)
        if objective.loss.search:
            objective.loss.search.measure(stats, batch)
    assert not counted.places
