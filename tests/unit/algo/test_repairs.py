"""Repairs of the search, which are ours: numbers by hand, the literal algorithm, what they are for."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from bapo_megatron.algo.bapo import (
    all_measures,
    balanced,
    contribution_sums,
    contributions,
    eq8_literal,
    floored,
    measured_sums,
)
from bapo_megatron.algo.bounds import Bounds, BoundsConfig, high_values, low_values, search_bounds
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import SearchedLoss
from tests.support import literal_bapo as literal
from tests.unit.algo.test_objective import pack
from tests.unit.trainer.test_update_loss import FakePolicy

FIRST_PASS = dataclasses.replace(balanced(), negative_weight="first_pass")
TWO_BY_TWO = BoundsConfig(
    low_start=0.6, low_end=0.8, low_step=0.2, high_start=1.2, high_end=2.0, high_step=0.8, target=0.5
)


def fields(ratios: list[float], advantages: list[float]) -> tuple[torch.Tensor, ...]:
    log_ratio_T = torch.tensor(ratios, dtype=torch.float64).log()
    one_T = torch.ones_like(log_ratio_T)
    return log_ratio_T, torch.tensor(advantages, dtype=torch.float64), -one_T, one_T


@pytest.mark.parametrize(
    ("kind", "negative"),
    [
        ("present", [0.7 + 1.5, 1.5]),  # N(0.6), N(0.8): the token at 0.5 is clipped at both
        ("first_pass", [1.0 + 1.5, 1.5]),
    ],
)
def test_a_suppressed_negative_counts_as_in_the_first_pass(kind: str, negative: list[float]) -> None:
    """Negative tokens at ratios 0.5, 0.7 and 1.5, a positive one at 1.1: P is 1.1 at both c_high."""
    config = dataclasses.replace(TWO_BY_TWO, negative_weight=kind)
    tokens = fields([0.5, 0.7, 1.5, 1.1], [-1.0, -1.0, -1.0, 1.0])
    assert contribution_sums(*tokens, config).tolist() == pytest.approx([1.1, 1.1, *negative])


def test_the_share_of_a_stale_batch_no_longer_rises_by_suppression() -> None:
    """One positive and two negative tokens; a pass later the negative ones have ratio 0.8.

    Share at rest, first pass: 1 / 3. Then, with the present ratio: 1 / (1 + 1.6) = 0.385; repaired: 1 / 3.
    """
    for ratio, kind, share in [
        (1.0, "present", 1 / 3),
        (0.8, "present", 1 / 2.6),
        (0.8, "first_pass", 1 / 3),
    ]:
        config = dataclasses.replace(TWO_BY_TWO, negative_weight=kind)
        sums = contribution_sums(*fields([1.0, ratio, ratio], [1.0, -1.0, -1.0]), config).tolist()
        assert sums[0] / (sums[0] + sums[2]) == pytest.approx(share)


@pytest.mark.parametrize("weight", ["uniform", "rollout_probability"])
def test_the_repaired_sums_are_the_literal_ones(weight: str) -> None:
    config = dataclasses.replace(FIRST_PASS, weight=weight)
    generator = torch.Generator().manual_seed(4)
    log_ratio_T = torch.randn(300, generator=generator) * 0.5
    advantage_T = torch.randn(300, generator=generator)
    rollout_T = -torch.rand(300, generator=generator)
    mask_T = (torch.rand(300, generator=generator) > 0.2).float()
    tokens = [
        literal.Token(*(float(value) for value in row))
        for row in zip(log_ratio_T, advantage_T, rollout_T, mask_T, strict=True)
    ]
    expected = [literal.positive_sum(tokens, high, config) for high in high_values(config)]
    expected += [literal.negative_sum(tokens, low, config) for low in low_values(config)]
    sums = contribution_sums(log_ratio_T, advantage_T, rollout_T, mask_T, config)
    assert sums.tolist() == pytest.approx(expected, rel=1e-9)
    found, theirs = search_bounds(sums, config), literal.search_tokens(tokens, config)
    assert (found.low, found.high, found.rounds) == (theirs.low, theirs.high, theirs.rounds)


def test_the_logged_contributions_stay_those_of_the_paper() -> None:
    """The repair adds sums of its own before them, and changes none."""
    tokens = fields([0.5, 0.7, 1.5, 1.1], [-1.0, -1.0, -1.0, 1.0])
    plain, repaired = measured_sums(*tokens, balanced()), measured_sums(*tokens, FIRST_PASS)
    assert len(repaired) == len(plain) + 53
    row = all_measures(FIRST_PASS).index(balanced())
    torch.testing.assert_close(repaired[53 * row :][:53], plain[:53], rtol=1e-12, atol=0)
    found = search_bounds(repaired[:53], FIRST_PASS)
    logged = contributions(repaired, found, FIRST_PASS)
    assert logged == pytest.approx(contributions(plain, found, balanced()))
    assert not torch.equal(repaired[:53], plain[:53])


def test_a_held_search_begins_where_the_last_one_ended() -> None:
    """P = 1, 2 at c_high 1.2, 2.0 and N = 4, 3, at c_low 0.6, 0.8; the target is 1 / 2."""
    sums = [1.0, 2.0, 4.0, 1.5]
    assert search_bounds(sums, TWO_BY_TWO) == Bounds(0.8, 2.0, 2 / 3.5, 2, True)
    assert search_bounds([1.0, 2.0, 2.0, 1.5], TWO_BY_TWO) == Bounds(0.6, 2.0, 0.5, 1, True)
    # From 0.8 on, c_high still begins at its start: 1 / 2.5 = 0.4, then 2 / 3.5.
    assert search_bounds([1.0, 2.0, 2.0, 1.5], TWO_BY_TWO, 0.8) == Bounds(0.8, 2.0, 2 / 3.5, 1, True)
    assert search_bounds([3.0, 3.0, 2.0, 1.5], TWO_BY_TWO, 0.8) == Bounds(0.8, 1.2, 3 / 4.5, 0, True)
    assert search_bounds([0.0] * 4, TWO_BY_TWO, 0.8) == Bounds(0.8, 1.2, 0.0, 0, False)
    low_first = dataclasses.replace(TWO_BY_TWO, order="low_first")
    assert search_bounds([1.0, 2.0, 9.0, 9.0], low_first, 0.8) == Bounds(0.8, 2.0, 2 / 11, 1, False)


def test_a_held_search_is_the_literal_one() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        rows = torch.randn(60, 2, generator=generator).tolist()
        tokens = [literal.Token(0.3 * log_ratio, advantage - 0.3, -1.0, 1.0) for log_ratio, advantage in rows]
        columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
        for lowest in (0.6, 0.7, 0.84, 0.9):
            found = search_bounds(contribution_sums(*columns, balanced()), balanced(), lowest)
            theirs = literal.search_tokens(tokens, balanced(), lowest)
            assert (found.low, found.high, found.rounds) == (theirs.low, theirs.high, theirs.rounds)


# At the ratio 2 of FakePolicy: nothing but negative tokens, so that the search runs to its ends; and as
# many of both signs.
SCARCE = [pack([-1.0], [-1.0], [1.0], [7])]
PLENTY = [pack([1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [7, 7])]
HELD = dataclasses.replace(balanced(), low_within_batch="held", target=0.3)


@pytest.mark.parametrize("hold", [False, True])
def test_c_low_never_falls_within_a_batch(hold: bool) -> None:
    """Also where the update searches itself, and after a resume within the batch; the next begins anew."""
    policy = FakePolicy()
    clipping = UpdateLoss(AlgorithmConfig(bounds=HELD), hold)
    lows = []
    for packs, step_version in [(PLENTY, 7), (SCARCE, 7), (PLENTY, 7), (PLENTY, 9)]:
        loss, _ = clipping.loss(policy, packs, False, step_version)  # type: ignore[arg-type]
        if isinstance(loss, SearchedLoss):
            loss = loss.loss_of(policy.losses(packs, loss.measure))
        sums = policy.losses(packs, loss)
        clipping.observe(sums)
        metrics = clipping.objective.metrics(sums, clipping.found)
        lows.append(metrics["bapo/clip_low"])
        resumed = UpdateLoss(AlgorithmConfig(bounds=HELD), hold)
        resumed.load_state(json.loads(json.dumps(clipping.state())))
        clipping = resumed
    assert lows == [0.6, 0.9, 0.9, 0.6]


def test_a_held_c_low_counts_as_a_moved_bound() -> None:
    """The second search makes no move: its share is 1/2 at once. But its c_low is 0.9, the first one's."""
    policy = FakePolicy()
    clipping = UpdateLoss(AlgorithmConfig(bounds=dataclasses.replace(HELD, high_start=2.5)))
    rows = []
    for packs, step_version in [(SCARCE, 7), (PLENTY, 7), (PLENTY, 9)]:
        loss, _ = clipping.loss(policy, packs, False, step_version)  # type: ignore[arg-type]
        sums = policy.losses(packs, loss)  # type: ignore[arg-type]
        clipping.observe(sums)
        metrics = clipping.objective.metrics(sums, clipping.found)
        names = ("clip_low", "rounds", "bounds_moved", "moved_tokens")
        rows.append([metrics[f"bapo/{name}"] for name in names])
    assert rows == [[0.9, 25.0, 1.0, 1.0], [0.9, 0.0, 1.0, 1.0], [0.6, 0.0, 0.0, 0.0]]


def test_a_search_without_held_bounds_has_no_state() -> None:
    clipping = UpdateLoss(AlgorithmConfig(bounds=balanced()))
    policy = FakePolicy()
    loss, _ = clipping.loss(policy, PLENTY, False, 7)  # type: ignore[arg-type]
    clipping.observe(policy.losses(PLENTY, loss))  # type: ignore[arg-type]
    assert clipping.state() is None


def test_the_floor_is_a_start() -> None:
    assert low_values(floored()) == [0.8, 0.82, 0.84, 0.86, 0.88, 0.9]
    assert dataclasses.replace(floored(), low_start=0.6) == balanced()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            dataclasses.replace(eq8_literal(), negative_weight="first_pass"),
            "negative_weight=first_pass leaves out clipped tokens, measure=surrogate",
        ),
        (
            dataclasses.replace(balanced(), low_within_batch="held", scope="micro_batch"),
            "low_within_batch=held needs one c_low for the update, and scope=micro_batch has many",
        ),
    ],
)
def test_repairs_that_make_no_sense_are_named(config: BoundsConfig, message: str) -> None:
    assert any(problem.startswith(message) for problem in config.problems()), list(config.problems())


def test_sound_repairs_have_no_problems() -> None:
    both = dataclasses.replace(FIRST_PASS, low_within_batch="held")
    grouped = dataclasses.replace(FIRST_PASS, scope="micro_batch", bounds_tokens=100)
    lagged = dataclasses.replace(both, scope="lagged")
    assert not any(problem for config in (both, grouped, lagged) for problem in config.problems())
    assert math.isclose(FIRST_PASS.target, 0.4)
