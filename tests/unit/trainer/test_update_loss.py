"""Where an update's bounds and pi_old come from: which passes are made, which sums and weights follow."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.algo.bapo import BoundsConfig, balanced, grpo
from bapo_megatron.algo.corrections import truncated_importance
from bapo_megatron.config import AlgorithmConfig, BatchConfig, DataConfig, ModelConfig, RunConfig
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.train import train_on
from bapo_megatron.trainer.corrections import with_old_log_probs
from bapo_megatron.trainer.update_loss import UpdateLoss, checked_loss
from bapo_megatron.types import (
    Group,
    MicroBatch,
    PackLayout,
    Prompt,
    Rollout,
    SearchedLoss,
    TokenFn,
    TokenStats,
    UpdateResult,
)
from tests.support.batches import in_memory
from tests.support.runs import run_of
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
    """Nor sums of each micro-batch: the loss is not a search."""
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


def test_lagged_sums_of_an_earlier_version_are_read() -> None:
    """Sums of other readings stood behind those of the search, and its settings had two more fields."""
    policy, before = FakePolicy(), UpdateLoss(LAGGED)
    loss, first = before.loss(policy, PACKS, False)  # type: ignore[arg-type]
    before.observe(policy.losses(PACKS, loss))  # type: ignore[arg-type]
    state = json.loads(json.dumps(before.state()))
    state["lagged"] += [0.5] * 3 * 53
    state["lagged_bounds"] |= {"negative_weight": "present", "low_within_batch": "searched"}
    resumed = UpdateLoss(LAGGED)
    resumed.load_state(state)
    assert resumed.state() == before.state()
    policy.passes.clear()
    _, found = resumed.loss(policy, PACKS, False)  # type: ignore[arg-type]
    assert policy.passes == []
    assert found.bounds == first.bounds


def test_only_lagged_bounds_keep_anything() -> None:
    update_loss = UpdateLoss(AlgorithmConfig(bounds=balanced()))
    update_loss.observe(torch.zeros(500))
    assert update_loss.state() is None


class DriftingPolicy:
    """Log-probs at version v: that of the engine + (v - 9) ln 2. So at version 10 twice its probability."""

    pack_layout = PackLayout()
    has_experts = False

    def __init__(self) -> None:
        self.version = 10
        self.calls: list[str] = []
        self.packs: list[Sequence[MicroBatch]] = []

    def _stats(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        return [
            TokenStats(b.rollout_log_prob_T + (self.version - 9) * LN2, torch.ones_like(b.mask_T))
            for b in batches
        ]

    def log_probs(self, batches: Sequence[MicroBatch], trained_only: bool = False) -> list[TokenStats]:
        self.calls.append("log_probs")
        return self._stats(batches)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        self.calls.append("sum_over_replicas")
        return values.clone()

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.calls.append("old_sums")
        stats = [TokenStats(b.old_log_prob_T, torch.ones_like(b.mask_T)) for b in batches]
        return sum(fn(s, b) for s, b in zip(stats, batches, strict=True))

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.calls.append("token_sums")
        return sum(fn(s, b) for s, b in zip(self._stats(batches), batches, strict=True))

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn) -> UpdateResult:
        self.calls.append("update")
        self.packs.append(batches)
        sums = sum(loss(s, b) for s, b in zip(self._stats(batches), batches, strict=True))
        self.version += 1
        return UpdateResult(sums, 0.5, 1e-6)


def group(version: int = 8) -> Group:
    """Two responses of 1 and 3 tokens, sampled with probability 1/8 each; rewards 0 and 1."""
    rollouts = tuple(
        Rollout(
            np.full(length, 3, np.int32),
            np.full(length, -3 * LN2, np.float32),
            np.full(length, version, np.int32),
            "stop",
            reward,
        )
        for reward, length in ((0.0, 1), (1.0, 3))
    )
    return Group(Prompt(0, np.array([1, 2], np.int32), "", ""), rollouts)


def step(version: int = 8, **algorithm: object) -> tuple[list[dict[str, float | None]], DriftingPolicy]:
    """A step of two updates on one group, from version 10 on."""
    policy = DriftingPolicy()
    settings = AlgorithmConfig(bounds=balanced(), reuse_epochs=2, advantage="dr_grpo", **algorithm)
    config = RunConfig("t", ModelConfig(Path("m")), DataConfig(Path("d")), batch=BatchConfig(pack_tokens=64))
    config = dataclasses.replace(config, algorithm=settings)
    run = run_of(config, policy, UpdateLoss(settings))
    return train_on(run, 1, in_memory(group(version))), policy


def column(batches: Sequence[MicroBatch], name: str) -> list[float]:
    return [value for b in batches for value in getattr(b, name)[b.mask_T != 0].tolist()]


@pytest.mark.parametrize(
    ("old", "cap", "weight"), [(-2.0, 2.0, 2.0), (-2.0, 8.0, math.e), (-4.0, 2.0, 1 / math.e), (90.0, 5, 5)]
)
def test_truncated_importance_by_hand(old: float, cap: float, weight: float) -> None:
    """pi_rollout = e^-3."""
    found = truncated_importance(np.array([old], np.float32), np.array([-3.0], np.float32), cap)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([weight], rel=1e-6)


def test_old_log_probs_are_the_trainers_in_every_update_of_the_step() -> None:
    """pi_old = 1/4 (version 10). The ratio is 1 in the first update and 2 in the second."""
    updates, policy = step(old_log_probs="trainer")
    for packs in policy.packs:
        assert column(packs, "old_log_prob_T") == pytest.approx([-2 * LN2] * 4)
        assert column(packs, "rollout_log_prob_T") == pytest.approx([-3 * LN2] * 4)
        assert column(packs, "weight_T") == [1.0] * 4
    assert [row["policy/ratio_gap"] for row in updates] == pytest.approx([0.0, LN2], abs=1e-6)


def test_the_ratio_of_the_first_update_is_known() -> None:
    """Though no token is of the present weights. The second update needs a pass for its bounds."""
    _, policy = step(old_log_probs="trainer")
    expected = ["log_probs", "sum_over_replicas", "old_sums", "update", "token_sums", "update"]
    assert policy.calls == expected


def test_reported_log_probs_need_no_pass_and_are_known_where_the_present_weights_sampled() -> None:
    updates, policy = step(version=10)
    assert policy.calls == ["old_sums", "update", "token_sums", "update"]
    assert [row["policy/ratio_gap"] for row in updates] == pytest.approx([LN2, 2 * LN2])
    assert step(version=8)[1].calls == ["token_sums", "update", "token_sums", "update"]


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(("cap", "weight"), [(1.5, 1.5), (3.0, 2.0)])
def test_importance_weighs_the_loss_and_the_contributions(cap: float, weight: float) -> None:
    """pi_old / pi_rollout = 2. One token at A = -1/2, three at 1/2; at ratio 1 the loss is -w (3 - 1) / 2."""
    updates, policy = step(old_log_probs="trainer", importance_cap=cap)
    for packs in policy.packs:
        assert column(packs, "weight_T") == pytest.approx([weight] * 4)
    assert updates[0]["policy/loss"] == pytest.approx(-weight / 4)
    assert updates[0]["bapo/contribution"] == pytest.approx(0.75)


@pytest.mark.parametrize("mode", ["rollout", "trainer"])
def test_the_gap_is_measured_in_the_first_update_of_either_mode(mode: str) -> None:
    """The trainer says twice the engine's probability: ln 2, whose bin ends at 2^(-1/2)."""
    first, second = step(version=10, old_log_probs=mode)[0]
    assert first["rollout/engine_gap_mean"] == pytest.approx(LN2)
    assert first["rollout/engine_gap_max"] == pytest.approx(0.5**0.5)
    assert second["rollout/engine_gap_mean"] is None
    assert step(version=9, old_log_probs=mode)[0][0]["rollout/engine_gap_mean"] is None


def test_an_empty_step_makes_no_pass() -> None:
    policy = DriftingPolicy()
    assert with_old_log_probs(policy, [], 64, None) == []  # type: ignore[arg-type]
    assert policy.calls == []


def sample(prompt: int, log_probs: list[float]) -> Sample:
    tokens = np.zeros(prompt + len(log_probs), np.int32)
    versions = np.zeros(len(log_probs), np.int32)
    return Sample(tokens, np.array(log_probs, np.float32), versions, 1.0)


def test_a_response_without_a_predicting_position_gets_no_log_prob() -> None:
    """A single token takes no room in a pack; here the pack is a dummy."""
    [[found]] = with_old_log_probs(DriftingPolicy(), [[sample(0, [-9])]], 6, None)  # type: ignore[arg-type]
    assert found.old_log_probs_R.tolist() == [0]


def test_each_sample_gets_its_own_log_probs_back() -> None:
    """Responses of different lengths, one empty, one without a token before it; packs of at most 6 tokens."""
    groups = [
        [sample(2, [-1, -2]), sample(1, [])],
        [sample(3, []), sample(2, [-3, -4, -5]), sample(0, [-9]), sample(1, [-6])],
    ]
    found = with_old_log_probs(DriftingPolicy(), groups, 6, 4.0)  # type: ignore[arg-type]
    assert [len(group) for group in found] == [2, 4]
    for ours, theirs in zip(chain(*found), chain(*groups), strict=True):
        assert ours.log_probs_R is theirs.log_probs_R
        if len(theirs.token_ids) > theirs.response_tokens:
            assert ours.old_log_probs_R.tolist() == pytest.approx((theirs.log_probs_R + LN2).tolist())
            assert ours.importance_R.tolist() == pytest.approx([2.0] * theirs.response_tokens)
