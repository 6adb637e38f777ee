"""KL to a reference policy: estimators by hand, loss and gradient against float64, metrics, penalties."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import pytest
import torch

from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.reference_kl import kl_estimate, kl_loss, response_penalty
from bapo_megatron.config import AlgorithmConfig, DistillationConfig, ReferenceKlConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.tensor_types import MicroBatch, TokenStats

LN2 = math.log(2)
Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: list[Estimator] = ["k1", "k2", "k3"]


def pack(
    reference: list[float], weights: list[float], mask: list[float], old: list[float] | None = None
) -> MicroBatch:
    """Tokens with these reference log-probs; pi_old = pi_rollout = 1/2 unless given, advantages 1."""
    count = len(reference)
    old_T = torch.tensor(old or [-LN2] * count)
    return MicroBatch.of(
        cu_seqlens=(0, count),
        rows=((0, 0, count),),
        sequences=1,
        mask_T=torch.tensor(mask),
        weight_T=torch.tensor(weights),
        advantage_T=torch.ones(count),
        rollout_log_prob_T=old_T,
        old_log_prob_T=old_T,
        reference_log_prob_T=torch.tensor(reference),
        sequence_T=torch.zeros(count, dtype=torch.int64),
    )


def stats(log_probs: list[float]) -> TokenStats:
    return TokenStats(torch.tensor(log_probs, requires_grad=True), torch.ones(len(log_probs)))


@pytest.mark.parametrize(
    ("estimator", "log_q", "value", "gradient"),
    [  # pi = 1/2, pi_ref = 1/4, so q = 1/2: d k3 / d log pi = 1 - q = 1/2
        ("k1", -LN2, LN2, 1.0),
        ("k2", -LN2, LN2**2 / 2, LN2),
        ("k3", -LN2, 0.5 - 1 + LN2, 0.5),
        # pi = 1/4, pi_ref = 1/2, q = 2: descent raises log pi with k2 and k3, and lowers it with k1
        ("k1", LN2, -LN2, 1.0),
        ("k2", LN2, LN2**2 / 2, -LN2),
        ("k3", LN2, 2 - 1 - LN2, -1.0),
        # the policy has lost the token: as at 20, without a gradient; the reference has, and pulls back
        ("k3", 60.0, math.exp(20) - 21, 0.0),
        ("k3", -60.0, 59.0, 1.0),
    ],
)
def test_estimators_by_hand(estimator: Estimator, log_q: float, value: float, gradient: float) -> None:
    log_prob_T = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    found_T = kl_estimate(log_prob_T, log_prob_T.detach() + log_q, estimator)
    found_T.sum().backward()
    assert found_T.item() == pytest.approx(value, abs=1e-14)
    assert log_prob_T.grad is not None
    assert log_prob_T.grad.item() == pytest.approx(gradient, abs=1e-14)


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [2.38629436, 0.0, -0.72157359, -2.45482254, 0.90392944], [4.38629436, 1.0, -0.22157359]),
        ("k2", [1.42360019, 0.0, 0.52066844, 0.75326919, 0.32683540], [3.80989455, 0.0, -0.20090515]),
        ("k3", [0.99282502, 0.0, 0.89542643, 0.93423354, 0.26046010], [2.38629436, 0.0, -0.72157359]),
    ],
)
def test_unbiased_as_of_the_peers(estimator: Estimator, values: list[float], gradients: list[float]) -> None:
    """Ratios 2, 1, 1/2, 4, 5/4 to pi_old: what slime 624b824 (``compute_approx_kl`` with its
    ``importance_ratio``) and, for k3, NeMo-RL 7ea279a (``calculate_kl``) make of these log-probs.

    The gradient of k3 is r log(pi / pi_ref): 2 * (ln 2 - 2 + 2.5), 0, (-1 - ln 2 + 1/4) / 2.
    """
    olds, ratios = [-2.0, -0.5, -1.0, -3.0, -1.5], [2.0, 1.0, 0.5, 4.0, 1.25]
    found = stats([old + math.log(r) for old, r in zip(olds, ratios, strict=True)])
    batch = pack([-2.5, -0.5, -0.25, -1.0, -2.0], [1.0] * 5, [1.0] * 5, olds)
    config = ReferenceKlConfig(1.0, estimator, unbiased=True)
    kl_loss(found, batch, config).backward()
    plain = TokenStats(found.log_prob_T.detach(), found.entropy_T)
    each = [float(kl_loss(plain, dataclasses.replace(batch, mask_T=one), config)) for one in torch.eye(5)]
    assert each == pytest.approx(values, abs=3e-7)
    assert found.log_prob_T.grad is not None
    assert found.log_prob_T.grad.tolist()[:3] == pytest.approx(gradients, abs=1e-6)


TRAINED = ["1", "101", "11011101011", "1111", "00"]
"""Loss masks of ragged responses: 1, 2, 8, 4 and 0 trained tokens, so that a mean over sequences has exact
weights, 15/4, 15/8, 15/32 and 15/16: one without a trained token does not count."""


def ragged(generator: np.random.Generator) -> list[Sample]:
    """Responses after prompts of 1 to 5 tokens; what is not trained on has no log-probs."""
    samples = []
    for number, text in enumerate(TRAINED):
        mask_R = np.array(list(text)) == "1"
        draws = np.where(mask_R, -6 * generator.random((3, len(mask_R))), np.nan).astype(np.float32)
        one = Sample(
            generator.integers(0, 9, 1 + number + len(mask_R)).astype(np.int32),
            draws[0],
            np.zeros(len(mask_R), np.int32),
            advantage=1.0,
            importance_R=generator.choice([0.5, 1, 2], len(mask_R)).astype(np.float32),
            reference_log_probs_R=draws[1],
            teacher_log_probs_R=draws[2],
            loss_mask_R=mask_R,
        )
        samples.append(one)
    return samples


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("term", ["reference", "distillation"])
def test_loss_and_gradient_equal_a_plain_loop(term: str, estimator: Estimator, mean: str) -> None:
    """Over responses in Python's float64, with central differences; the objective sees packs of them."""
    generator = np.random.default_rng(7)
    samples = ragged(generator)
    packs = pack_samples(samples, 16, mean)
    assert len(packs) > 1
    places = {  # of each response's trained tokens: its pack, the position that predicts each
        index: (number, start + positions - samples[index].response_tokens + np.arange(16))
        for number, pack in enumerate(packs)
        for index, start, positions in pack.rows
    }
    policy = [-6 * generator.random(len(pack.mask_T)) for pack in packs]

    def loop(policy: list[np.ndarray], kind: str, weighted: bool) -> float:
        """Mean over all trained tokens, or over responses of the mean over theirs."""
        total = 0.0
        for index, one in enumerate(samples):
            column = "teacher_log_probs_R" if term == "distillation" else "reference_log_probs_R"
            other_R, importance_R = (vars(one)[name].tolist() for name in (column, "importance_R"))
            number, place_R = places[index]
            divisor = 15 if mean == "token" or not weighted else 4 * TRAINED[index].count("1")
            for token, live in enumerate(TRAINED[index]):
                if live == "1":
                    ratio = math.exp(other_R[token]) / math.exp(policy[number][place_R[token]])
                    log = math.log(ratio)
                    value = {"k1": -log, "k2": 0.5 * log**2, "k3": ratio - 1 - log}[kind]
                    total += value * (importance_R[token] if weighted else 1.0) / divisor
        return total

    config = (DistillationConfig if term == "distillation" else ReferenceKlConfig)(0.3, estimator)
    loss = build_loss(AlgorithmConfig(loss="cispo"))
    sums, gradients = [], []
    for objective in (Objective(loss), Objective(loss, **{term: config})):  # type: ignore[arg-type]
        leaves = [torch.tensor(one, requires_grad=True) for one in policy]
        of_packs = [
            objective.token_fn(None, 0)(TokenStats(leaf_T, torch.ones(len(leaf_T))), pack)
            for leaf_T, pack in zip(leaves, packs, strict=True)
        ]
        sums.append(torch.stack(of_packs).sum(0))
        gradients.append(torch.autograd.grad(sums[-1][0], leaves))
    expected = 0.3 * loop(policy, estimator, True)
    assert (sums[1][0] - sums[0][0]).item() / 15 == pytest.approx(expected, rel=1e-12)
    name, cost = (term, "loss") if term == "distillation" else ("reference_kl", "penalty")
    metrics = objective.metrics(sums[1].detach(), None)
    assert metrics[f"{name}/{cost}"] == pytest.approx(expected, rel=1e-12)
    for kind in ("k1", "k3"):
        assert metrics[f"{name}/{kind}"] == pytest.approx(loop(policy, kind, False), rel=1e-12)
    for number, pack in enumerate(packs):
        found_T = gradients[1][number] - gradients[0][number]
        for place in range(len(pack.mask_T)):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [one.copy() for one in policy]
                moved[number][place] += step
                ends.append(0.3 * loop(moved, estimator, True))
            slope = 15 * (ends[0] - ends[1]) / 2e-5
            assert found_T[place].item() == pytest.approx(slope, rel=1e-6, abs=1e-6)


def objective(config: ReferenceKlConfig, **algorithm: object) -> Objective:
    settings = AlgorithmConfig(loss="cispo", reference_kl=config, **algorithm)  # type: ignore[arg-type]
    return Objective(build_loss(settings), (), config)


def test_a_penalty_in_the_reward_leaves_the_loss_and_is_measured_at_the_old_policy() -> None:
    """pi = 1/2, pi_old = 1/8, pi_ref = 1/4: k1 is ln 2 now and was -ln 2; beta 0.1."""
    batch = pack([-2 * LN2], [3.0], [1.0], old=[-3 * LN2])
    config = ReferenceKlConfig(0.1, "k1", "reward")
    one, found = objective(config), stats([-LN2])
    without = Objective(build_loss(AlgorithmConfig(loss="cispo"))).token_fn(None, 0)(found, batch)
    sums = one.token_fn(None, 0)(found, batch)
    assert sums[0].item() == without[0].item()
    metrics = one.metrics(sums.detach(), None)
    assert metrics["reference_kl/k1"] == pytest.approx(LN2)
    assert metrics["reference_kl/penalty"] == pytest.approx(-0.1 * LN2)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.0), ("k2", LN2**2), ("k3", 0.5 - 1 + LN2 + 2 - 1 - LN2)]
)
def test_the_penalty_of_a_response_is_a_sum_over_its_tokens(estimator: Estimator, expected: float) -> None:
    """pi_old / pi_ref of two tokens: 2 and 1/2."""
    old_N, reference_N = torch.tensor([-LN2, -2 * LN2]), torch.tensor([-2 * LN2, -LN2])
    config = ReferenceKlConfig(0.5, estimator, "reward")
    assert response_penalty(old_N, reference_N, config) == pytest.approx(0.5 * expected, abs=1e-7)
