"""Where an update's bounds come from: which passes are made, and which sums decide."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.algo.bapo import BoundsConfig, balanced, grpo
from bapo_megatron.config import AlgorithmConfig, BatchConfig, DataConfig, ModelConfig, RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.trainer.update_loss import UpdateLoss, checked_loss
from bapo_megatron.types import MicroBatch, SearchedLoss, TokenFn, TokenStats
from tests.unit.algo.test_objective import pack

LN2 = 0.6931471805599453


class FakePolicy:
    """Thinks twice as much of every token as the sampling policy did; counts its passes."""

    version = 7

    def __init__(self) -> None:
        self.passes: list[str] = []

    def _sums(self, batches: Sequence[MicroBatch], fn: TokenFn, log_ratio: float) -> torch.Tensor:
        stats = [TokenStats(b.old_log_prob_T + log_ratio, torch.zeros_like(b.mask_T)) for b in batches]
        return sum(fn(*pair) for pair in zip(stats, batches, strict=True))

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.passes.append("model")
        return self._sums(batches, fn, LN2)

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.passes.append("rollouts")
        return self._sums(batches, fn, 0.0)

    def losses(self, batches: Sequence[MicroBatch], loss: TokenFn) -> torch.Tensor:
        return self._sums(batches, loss, LN2)


# One positive and one negative token: at ratio 1 both are alive and the share is 1/2 from the start. At
# ratio 2 the positive one is dead until c_high passes 2.0.
PACKS = [pack([1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [7, 7])]


def chosen(bounds: BoundsConfig, on_policy: bool = False, **rest: Any) -> tuple[Any, Any, list[str]]:
    policy = FakePolicy()
    hold = rest.pop("hold", False)
    update_loss = UpdateLoss(AlgorithmConfig(bounds=bounds, **rest), hold)
    loss, found = update_loss.loss(policy, PACKS, on_policy)  # type: ignore[arg-type]
    return loss, found, policy.passes


LAGGED = AlgorithmConfig(bounds=dataclasses.replace(balanced(), scope="lagged"))


@pytest.mark.parametrize(
    ("algorithm", "serves"),
    [
        (AlgorithmConfig(bounds=balanced()), True),
        (AlgorithmConfig(loss="gspo"), True),
        (AlgorithmConfig(loss="cispo"), False),  # searches nothing
        (AlgorithmConfig(bounds=grpo()), False),
        (LAGGED, False),
    ],
)
def test_forwards_are_held_for_a_search_over_the_update_alone(
    algorithm: AlgorithmConfig, serves: bool
) -> None:
    run = RunConfig("t", ModelConfig(Path("m")), DataConfig(Path("d")), algorithm=algorithm)
    checked_loss(run)
    held = dataclasses.replace(run, batch=BatchConfig(hold_forwards=True))
    if serves:
        checked_loss(held)
    else:
        with pytest.raises(ConfigError, match=r"^batch.hold_forwards serves .*algorithm.loss=.* makes none"):
            checked_loss(held)


@pytest.mark.parametrize("scope", ["update", "lagged", "micro_batch"])
def test_fixed_bounds_need_no_pass(scope: Any) -> None:
    """Nor sums of each micro-batch: the loss is no search."""
    loss, found, passes = chosen(dataclasses.replace(grpo(), scope=scope))
    assert passes == []
    assert not isinstance(loss, SearchedLoss)
    assert (found.bounds.low, found.bounds.high) == (0.8, 1.2)


def test_the_exact_search_makes_one_pass() -> None:
    _, found, passes = chosen(balanced())
    assert passes == ["model"]
    assert (found.bounds.low, found.bounds.high) == (0.6, 2.05)


@pytest.mark.parametrize("bounds", [BoundsConfig(), balanced()])
def test_log_probs_that_are_not_finite_end_the_search_as_a_floating_point_error(bounds: BoundsConfig) -> None:
    """As a loss or a gradient norm that is not finite does, on every rank: the sums are the reduced ones."""

    class Broken(FakePolicy):
        def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
            return self._sums(batches, fn, math.nan)

    broken: Any = Broken()
    with pytest.raises(FloatingPointError, match="the contribution sums are not finite"):
        UpdateLoss(AlgorithmConfig(bounds=bounds)).loss(broken, PACKS, False)


def test_a_known_ratio_makes_no_pass() -> None:
    """The share is 1/2 at once: nothing moves."""
    _, found, passes = chosen(balanced(), on_policy=True)
    assert passes == ["rollouts"]
    assert (found.bounds.low, found.bounds.high) == (0.6, 1.2)


def test_a_known_ratio_may_be_ignored() -> None:
    _, found, passes = chosen(balanced(), on_policy=True, known_ratio=False)
    assert passes == ["model"]
    assert found.bounds.high == 2.05


@pytest.mark.parametrize(
    ("old", "source", "moment"), [("rollout", "model", LN2**2), ("trainer", "rollouts", 0.0)]
)
def test_a_mask_that_is_the_loss_is_measured(old: Any, source: str, moment: float) -> None:
    """Of M2PO: at ratio 2 engine and trainer differ, which the loss must see."""
    policy = FakePolicy()
    config = AlgorithmConfig(loss="m2po", old_log_probs=old)
    _, found = UpdateLoss(config).loss(policy, PACKS, on_policy=True)  # type: ignore[arg-type]
    assert policy.passes == [source]
    assert found.moment == pytest.approx(moment)


@pytest.mark.parametrize(("scope", "hold"), [("update", True), ("micro_batch", False)])
def test_the_update_may_search_by_itself(scope: Any, hold: bool) -> None:
    config = dataclasses.replace(balanced(), scope=scope)
    loss, found, passes = chosen(config, hold=hold)
    assert isinstance(loss, SearchedLoss)
    assert loss.over == scope
    assert found is None
    assert passes == []
    policy = FakePolicy()
    sums = policy.losses(PACKS, loss.loss_of(policy.token_sums(PACKS, loss.measure)))
    # Bounds (0.6, 2.05): minus (2 - 2).
    assert float(sums[0]) == pytest.approx(0.0, abs=1e-6)


def test_lagged_bounds_are_those_of_the_update_before() -> None:
    """The first update searches exactly; the second takes the sums that the first one's loss measured."""
    config = AlgorithmConfig(bounds=dataclasses.replace(balanced(), scope="lagged"))
    policy, update_loss = FakePolicy(), UpdateLoss(config)
    loss, first = update_loss.loss(policy, PACKS, False)  # type: ignore[arg-type]
    assert policy.passes == ["model"]
    assert update_loss.state() is None
    update_loss.observe(policy.losses(PACKS, loss))  # type: ignore[arg-type]
    other = [pack([1.0, -9.0], [-1.0, -1.0], [1.0, 1.0], [7, 7])]
    _, second = update_loss.loss(policy, other, True)  # type: ignore[arg-type]
    assert policy.passes == ["model"]
    assert second.bounds == first.bounds

    resumed = UpdateLoss(config)
    resumed.load_state(json.loads(json.dumps(update_loss.state())))
    _, third = resumed.loss(policy, other, False)  # type: ignore[arg-type]
    assert policy.passes == ["model"]
    assert third.bounds == first.bounds


@pytest.mark.parametrize("changed", [{"high_end": 4.0}, {"high_start": 1.25, "high_end": 3.05}])
def test_lagged_sums_are_of_their_candidates_alone(changed: dict[str, float]) -> None:
    """With other bounds, as many or not, a resumed run measures the first update as a new one does."""
    policy, before = FakePolicy(), UpdateLoss(LAGGED)
    loss, _ = before.loss(policy, PACKS, False)  # type: ignore[arg-type]
    before.observe(policy.losses(PACKS, loss))  # type: ignore[arg-type]
    bounds = dataclasses.replace(LAGGED.bounds, **changed)
    fresh, resumed = (UpdateLoss(AlgorithmConfig(bounds=bounds)) for _ in range(2))
    resumed.load_state(json.loads(json.dumps(before.state())))
    other = [pack([3.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [7, 7])]
    policy.passes.clear()
    expected, found = (one.loss(policy, other, False)[1] for one in (fresh, resumed))  # type: ignore[arg-type]
    assert policy.passes == ["model", "model"]
    assert found.bounds == expected.bounds


def test_only_lagged_bounds_keep_anything() -> None:
    update_loss = UpdateLoss(AlgorithmConfig(bounds=balanced()))
    update_loss.observe(torch.zeros(500))
    assert update_loss.state() is None
