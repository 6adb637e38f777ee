"""Where an update's bounds and pi_old come from: which passes are made, which sums and weights follow."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from bapo_megatron.algo.bapo import BoundsConfig, balanced, grpo
from bapo_megatron.algo.corrections import truncated_importance
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.data.samples import Sample
from bapo_megatron.tensor_types import MicroBatch, SearchedLoss
from bapo_megatron.train import train_on
from bapo_megatron.trainer.corrections import with_old_log_probs
from bapo_megatron.trainer.update_loss import UpdateLoss
from tests.support.batches import in_memory
from tests.support.runs import run_of
from tests.support.small_steps import LN2, NotedPolicy, group, rollout, run_config
from tests.unit.algo.test_objective import pack

# One positive and one negative token: at ratio 1 both are alive and the share is 1/2 from the start. At
# ratio 2 the positive one is dead until c_high passes 2.0.
PACKS = [pack([1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [7, 7])]


SCOPES: list[Any] = ["update", "lagged", "micro_batch"]
LAGGED = AlgorithmConfig(bounds=replace(balanced(), scope="lagged"))


@pytest.mark.parametrize(
    ("bounds", "rest", "on_policy", "passes", "found"),
    [
        *((replace(grpo(), scope=scope), {}, False, [], (0.8, 1.2)) for scope in SCOPES),
        (balanced(), {}, False, ["token_sums"], (0.6, 2.05)),
        (balanced(), {}, True, ["old_sums"], (0.6, 1.2)),  # the share is 1/2 at once: nothing moves
        (balanced(), {"known_ratio": False}, True, ["token_sums"], (0.6, 2.05)),
    ],
)
def test_bounds_and_the_passes_that_they_need(
    bounds: BoundsConfig, rest: Any, on_policy: bool, passes: list[str], found: tuple[float, float]
) -> None:
    policy: Any = NotedPolicy()
    update_loss = UpdateLoss(AlgorithmConfig(bounds=bounds, **rest))
    assert not isinstance(update_loss.loss(policy, PACKS, on_policy), SearchedLoss)
    bounds = update_loss.found
    assert (policy.calls, (bounds.low, bounds.high)) == (passes, found)


@pytest.mark.parametrize("bounds", [BoundsConfig(), balanced()])
def test_log_probs_that_are_not_finite_end_the_search_as_a_floating_point_error(bounds: BoundsConfig) -> None:
    """As a loss or a gradient norm that is not finite does, on every rank: the sums are the reduced ones."""
    broken: Any = NotedPolicy(math.nan)
    with pytest.raises(FloatingPointError, match="the contribution sums are not finite"):
        UpdateLoss(AlgorithmConfig(bounds=bounds)).loss(broken, PACKS, False)


@pytest.mark.parametrize(
    ("old", "source", "moment"), [("rollout", "token_sums", LN2**2), ("trainer", "old_sums", 0.0)]
)
def test_a_mask_that_is_the_loss_is_measured(old: Any, source: str, moment: float) -> None:
    """Of M2PO: at ratio 2 engine and trainer differ, which the loss must see."""
    policy: Any = NotedPolicy()
    (update_loss := UpdateLoss(AlgorithmConfig(loss="m2po", old_log_probs=old))).loss(policy, PACKS, True)
    assert policy.calls == [source]
    assert update_loss.found.moment == pytest.approx(moment)


@pytest.mark.parametrize(("scope", "hold"), [("update", True), ("micro_batch", False)])
def test_the_update_may_search_by_itself(scope: Any, hold: bool) -> None:
    policy: Any = NotedPolicy()
    config = AlgorithmConfig(bounds=replace(balanced(), scope=scope))
    loss = (update_loss := UpdateLoss(config, hold)).loss(policy, PACKS, False)
    assert isinstance(loss, SearchedLoss)
    assert (loss.over, update_loss.found, policy.calls) == (scope, None, [])
    sums = policy.sums(PACKS, loss.loss_of(policy.sums(PACKS, loss.measure)))
    assert float(sums[0]) == pytest.approx(0.0, abs=1e-6)  # bounds (0.6, 2.05): minus (2 - 2)


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(bounds=grpo()), AlgorithmConfig(loss="cispo")])
def test_nothing_is_held_without_a_search(algorithm: AlgorithmConfig) -> None:
    policy: Any = NotedPolicy()
    assert not isinstance(UpdateLoss(algorithm, True).loss(policy, PACKS, False), SearchedLoss)
    assert policy.calls == []


def trained(policy: Any) -> tuple[UpdateLoss, Any]:
    """The loss of a run with lagged bounds after its first update, and what that one found."""
    update_loss = UpdateLoss(LAGGED)
    loss, first = update_loss.loss(policy, PACKS, False), update_loss.found
    assert update_loss.state() is None
    update_loss.observe(policy.sums(PACKS, loss))
    assert policy.calls == ["token_sums"]
    policy.calls.clear()
    return update_loss, first


def stored(update_loss: UpdateLoss) -> Any:
    return json.loads(json.dumps(update_loss.state()))


def test_lagged_bounds_are_those_of_the_update_before() -> None:
    """The first update searches exactly; the second takes the sums that the first one's loss measured.

    So does a resumed one, also of an earlier version: sums of other readings stood behind those of the
    search, and its settings had two more fields.
    """
    policy: Any = NotedPolicy()
    update_loss, first = trained(policy)
    other = [pack([1.0, -9.0], [-1.0, -1.0], [1.0, 1.0], [7, 7])]
    old = stored(update_loss)
    old["lagged"] += [0.5] * 3 * 53
    old["lagged_bounds"] |= {"negative_weight": "present", "low_within_batch": "searched"}
    for state in (None, stored(update_loss), old):
        resumed = update_loss
        if state:
            resumed = UpdateLoss(LAGGED)
            resumed.load_state(state)
            assert resumed.state() == update_loss.state()
        resumed.loss(policy, other, state is None)
        assert policy.calls == []
        assert resumed.found == first


@pytest.mark.parametrize("changed", [{"high_end": 4.0}, {"high_start": 1.25, "high_end": 3.05}])
def test_lagged_sums_are_of_their_candidates_alone(changed: dict[str, float]) -> None:
    """With other bounds, as many or not, a resumed run measures the first update as a new one does."""
    policy: Any = NotedPolicy()
    before, _ = trained(policy)
    config = AlgorithmConfig(bounds=replace(LAGGED.bounds, **changed))
    fresh, resumed = UpdateLoss(config), UpdateLoss(config)
    resumed.load_state(stored(before))
    other = [pack([3.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [7, 7])]
    for one in (fresh, resumed):
        one.loss(policy, other, False)
    assert policy.calls == ["token_sums", "token_sums"]
    assert resumed.found == fresh.found


def step(version: int = 8, **algorithm: Any) -> tuple[list[dict[str, float | None]], NotedPolicy]:
    """A step of two updates from version 10 on, whose log-probs rise by ln 2 in each.

    One group of responses of 1 and 3 tokens, sampled with probability 1/8 each; rewards 0 and 1.
    """
    settings = AlgorithmConfig(bounds=balanced(), reuse_epochs=2, advantage="dr_grpo", **algorithm)
    policy = NotedPolicy(drift=LN2)
    responses = (rollout(reward, length, -3 * LN2, version) for reward, length in ((0.0, 1), (1.0, 3)))
    run = run_of(run_config(settings), policy, UpdateLoss(settings))
    return train_on(run, 1, in_memory(group(*responses))), policy


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
    """pi_old = 1/4 (version 10). The ratio is 1 in the first update, which is known though no token is of the
    present weights, and 2 in the second, which needs a pass for its bounds."""
    updates, policy = step(old_log_probs="trainer")
    for packs in policy.packs:
        assert column(packs, "old_log_prob_T") == pytest.approx([-2 * LN2] * 4)
        assert column(packs, "rollout_log_prob_T") == pytest.approx([-3 * LN2] * 4)
        assert column(packs, "weight_T") == [1.0] * 4
    assert [row["policy/ratio_gap"] for row in updates] == pytest.approx([0.0, LN2], abs=1e-6)
    assert policy.calls == ["log_probs", "old_sums", "update", "token_sums", "update"]


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


def sample(prompt: int, log_probs: list[float]) -> Sample:
    tokens = np.zeros(prompt + len(log_probs), np.int32)
    return Sample(tokens, np.array(log_probs, np.float32), np.zeros(len(log_probs), np.int32), 1.0)


def test_each_sample_gets_its_own_log_probs_back() -> None:
    """Responses of different lengths, one empty, one without a token before it; packs of at most 6 tokens."""
    groups = [
        [sample(2, [-1, -2]), sample(1, [])],
        [sample(3, []), sample(2, [-3, -4, -5]), sample(0, [-9]), sample(1, [-6])],
    ]
    policy: Any = NotedPolicy()
    found = with_old_log_probs(policy, groups, 6, 4.0)
    assert [len(group) for group in found] == [2, 4]
    for ours, theirs in zip(chain(*found), chain(*groups), strict=True):
        assert ours.log_probs_R is theirs.log_probs_R
        if len(theirs.token_ids) > theirs.response_tokens:
            assert ours.old_log_probs_R.tolist() == pytest.approx((theirs.log_probs_R + LN2).tolist())
            assert ours.importance_R.tolist() == pytest.approx([2.0] * theirs.response_tokens)
    # A single token takes no room in a pack; here the pack is a dummy.
    [[found_alone]] = with_old_log_probs(policy, [[sample(0, [-9])]], 6, None)
    assert found_alone.old_log_probs_R.tolist() == [0]
    policy.calls.clear()
    assert with_old_log_probs(policy, [], 64, None) == []
    assert policy.calls == []
