"""Sums, loss and counts on tokens that a reader can check by hand; tests/property has the edges."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algo import bapo
from bapo_megatron.algo.bounds import Bounds, BoundsConfig

# c_high in 1.5, 2.0 and c_low in 0.5, 0.75.
GRID = BoundsConfig(
    low_start=0.5, low_end=0.75, low_step=0.25, high_start=1.5, high_end=2.0, high_step=0.5, target=0.5
)
# Five tokens: ratio, advantage, pi_rollout.
RATIOS = [1.0, 1.75, 4.0, 0.6, 1.0]
ADVANTAGES = [1.0, 1.0, 0.5, -1.0, -2.0]
PROBABILITIES = [0.5, 0.25, 0.1, 0.2, 0.4]


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(mask: list[float] | None = None) -> dict[str, Tensor]:
    return {
        "log_ratio_T": float64(RATIOS).log(),
        "advantage_T": float64(ADVANTAGES),
        "rollout_log_prob_T": float64(PROBABILITIES).log(),
        "mask_T": float64(mask or [1.0] * 5),
    }


def approx(values: Any) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def sums(measure: str, weight: str, **changes: Any) -> list[float]:
    config = dataclasses.replace(GRID, measure=measure, weight=weight)
    return bapo.contribution_sums(**{**batch(), **changes}, config=config).tolist()


@pytest.mark.parametrize(
    ("measure", "weight", "expected"),
    [
        # P(1.5) = 1 * 1.0 + 1 * 1.5 + 0.5 * 1.5 = 3.25     P(2.0) = 1 * 1.0 + 1 * 1.75 + 0.5 * 2.0 = 3.75
        # N(0.5) = 1 * 0.6 + 2 * 1.0 = 2.6                  N(0.75) = 1 * 0.75 + 2 * 1.0 = 2.75
        ("surrogate", "uniform", [3.25, 3.75, 2.6, 2.75]),
        # P(1.5) = 1.0          P(2.0) = 1.0 + 1.75 = 2.75        (4.0 is clipped at both)
        # N(0.5) = 0.6 + 2.0    N(0.75) = 2.0                     (0.6 is clipped at 0.75)
        ("gradient", "uniform", [1.0, 2.75, 2.6, 2.0]),
        # P(1.5) = 0.5 * 1.0 + 0.25 * 1.5 + 0.1 * 0.75 = 0.95    P(2.0) = 0.5 + 0.25 * 1.75 + 0.1 = 1.0375
        # N(0.5) = 0.2 * 0.6 + 0.4 * 2.0 = 0.92                  N(0.75) = 0.2 * 0.75 + 0.8 = 0.95
        ("surrogate", "rollout_probability", [0.95, 1.0375, 0.92, 0.95]),
        # P(1.5) = 0.5    P(2.0) = 0.5 + 0.25 * 1.75 = 0.9375    N(0.5) = 0.12 + 0.8 = 0.92    N(0.75) = 0.8
        ("gradient", "rollout_probability", [0.5, 0.9375, 0.92, 0.8]),
    ],
)
def test_sums_by_hand(measure: str, weight: str, expected: list[float]) -> None:
    assert sums(measure, weight) == approx(expected)


def test_a_token_on_a_bound_is_clipped_by_it_in_the_search_as_in_the_loss() -> None:
    """At the candidates themselves: P(2.0) has the token at 1.5 alone, N(0.5) the one at 0.75."""
    log_ratio_T = float64([math.log(ratio) for ratio in (0.5, 0.75, 1.5, 2.0)])
    tokens = {"advantage_T": float64([-1.0, -1.0, 1.0, 1.0]), "mask_T": torch.ones(4)}
    found = sums("gradient", "uniform", log_ratio_T=log_ratio_T, rollout_log_prob_T=torch.zeros(4), **tokens)
    assert found == approx([0.0, 1.5, 0.75, 0.0])


def test_sums_are_float64_carry_no_gradient_and_leave_their_input_alone() -> None:
    fields, before = ({name: field.float() for name, field in batch().items()} for _ in range(2))
    fields["log_ratio_T"].requires_grad_()
    got = bapo.contribution_sums(**fields, config=GRID)
    assert got.dtype == torch.float64
    assert not got.requires_grad
    assert all(torch.equal(fields[name], before[name]) for name in fields)
    nan_T = float64([math.nan] * 5)  # uniform weights do not read it
    assert sums("surrogate", "uniform", rollout_log_prob_T=nan_T) == sums("surrogate", "uniform")


@pytest.mark.parametrize("name", ["log_ratio_T", "advantage_T", "rollout_log_prob_T"])
@pytest.mark.parametrize("measure", ["surrogate", "gradient"])
def test_nan_in_a_token_that_counts_is_not_lost(name: str, measure: str) -> None:
    """Nor in one that no candidate clips, or that all do."""
    for position in range(5):
        broken_T = batch()[name].index_fill(0, torch.tensor(position), math.nan)
        assert all(map(math.isnan, sums(measure, "rollout_probability", **{name: broken_T})))


LN = math.log
BOUNDS = Bounds(0.75, 1.5)
DUAL = Bounds(0.75, 1.5, dual_clip=3.0)


@pytest.mark.parametrize(
    ("log_ratios", "advantages", "weights", "bounds", "loss", "gradient"),
    [
        # ratio, A -> min(r A, clip(r) A), and d/d log r of it (r A where alive):
        # 1.0, 1.0 -> 1.0 (alive, 1.0)          1.75, 1.0 -> 1.5 (clipped)     4.0, 0.5 -> 0.75 (clipped)
        # 0.6, -1.0 -> min(-0.6, -0.75) = -0.75 (clipped)                      1.0, -2.0 -> -2.0 (alive, -2.0)
        # sum = 1.0 + 1.5 + 0.75 - 0.75 - 2.0 = 0.5
        ([*map(LN, RATIOS)], ADVANTAGES, [1.0] * 5, BOUNDS, -0.5, [-1.0, 0.0, 0.0, 0.0, 2.0]),
        # 0.5 * 1.0 + 1.5 + 0.75 - 0.25 * 0.75 - 2.0 = 0.5625
        (
            [*map(LN, RATIOS)],
            ADVANTAGES,
            [0.5, 1.0, 1.0, 0.25, 1.0],
            BOUNDS,
            -0.5625,
            [-0.5, 0.0, 0.0, 0.0, 2.0],
        ),
        # On a bound: -(1.5 - 0.75), clipped.
        ([LN(1.5), LN(0.75)], [1.0, -1.0], [1.0] * 2, BOUNDS, -0.75, [0.0, 0.0]),
        # Inside the other bound the minimum takes the unclipped side: -(0.25 - 4.0).
        ([LN(0.25), LN(4.0)], [1.0, -1.0], [1.0] * 2, BOUNDS, 3.75, [-0.25, 4.0]),
        # A < 0: r = 4 counts as 3, without gradient; r = 2 is untouched. A > 0: r = 4 is clipped at 1.5.
        ([LN(4.0), LN(2.0), LN(4.0)], [-1.0, -1.0, 1.0], [1.0] * 3, DUAL, 3.5, [0.0, 2.0, 0.0]),
        # Beyond the limit of the log-ratio.
        (
            [1e3, -1e3, math.inf, -math.inf],
            [-1.0, 1.0, -1.0, 1.0],
            [1.0] * 4,
            BOUNDS,
            2 * math.exp(20.0) - 2 * math.exp(-20.0),
            [0.0] * 4,
        ),
    ],
)
def test_loss_and_gradient_by_hand(
    log_ratios: list[float],
    advantages: list[float],
    weights: list[float],
    bounds: Bounds,
    loss: float,
    gradient: list[float],
) -> None:
    log_ratio_T = float64(log_ratios).requires_grad_()
    found = bapo.policy_loss(log_ratio_T, float64(advantages), float64(weights), bounds)
    found.backward()
    assert found.item() == approx(loss)
    assert log_ratio_T.grad is not None
    assert log_ratio_T.grad.tolist() == approx(gradient)
