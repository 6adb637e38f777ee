"""Masks in an update: what is packed, what it is divided by, and the shares in the metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bapo_megatron.algo.advantages import dr_grpo
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.config import AlgorithmConfig, PartConfig
from bapo_megatron.train import train_on
from bapo_megatron.trainer.corrections import corrected, with_old_log_probs
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import Rollout, VersionSpan
from tests.support.batches import in_memory, samples_of
from tests.support.runs import run_of
from tests.support.small_steps import ShiftedPolicy, group, run_config

pytestmark = pytest.mark.usefixtures("one_process_group")

ICEPOP = PartConfig("icepop", {"low": 0.6, "high": 1.9})


def rollout(ids: list[int], reward: float, reason: Any = "stop", mask: list[bool] | None = None) -> Rollout:
    """The token 10 + k has pi / pi_rollout = 2^(k / 2); the first is of version 1, the others of 2."""
    count = len(ids)
    versions = np.array([1, *[2] * (count - 1)], np.int32)
    mask_R = None if mask is None else np.array(mask)
    columns = (np.array(ids, np.int32), np.full(count, -3.0, np.float32), versions)
    return Rollout(*columns, reason, reward, loss_mask_R=mask_R)


BATCH = in_memory(
    group(
        rollout([12, 10, 8, 10], 1.0, mask=[True, True, True, False]),  # one of three is left
        rollout([12, 12], 0.0),  # none
        rollout([10, 10], 0.0, "length"),  # both, but for cut_responses
        rollout([10, 10, 10], 0.0),
    )
)


def settings(*masks: PartConfig, **rest: Any) -> AlgorithmConfig:
    return AlgorithmConfig(old_log_probs="trainer", advantage="dr_grpo", masks=masks, **rest)


def left(*masks: PartConfig, **rest: Any) -> tuple[list[Any], dict[str, float | None]]:
    policy: Any = ShiftedPolicy()
    config = settings(*masks, **rest)
    stored = samples_of(BATCH, dr_grpo)
    groups = with_old_log_probs(policy, stored, 64, config.importance_cap)
    [group], metrics = corrected(policy, groups, config, 64, False)
    return group, metrics


def test_tokens_and_responses_leave_the_update() -> None:
    """10 trained tokens; of 4 responses IcePop takes 2 tokens of the first and all of the second, the other
    mask the third. The advantages are of all four: the mean reward is 1/4."""
    group, metrics = left(ICEPOP, PartConfig("cut_responses"))
    assert [(one.trained_tokens, one.predicted_tokens, one.advantage) for one in group] == [
        (1, 1, 0.75),
        (3, 3, -0.25),
    ]
    assert group[0].loaded().trained_R.tolist() == [False, True, False, False]
    assert group[0].versions == group[0].loaded().versions == VersionSpan(1, 2, 2, 2)
    assert metrics == pytest.approx(
        {
            "corrections/rejected_responses": 2 / 4,
            "corrections/rejected_tokens": 6 / 10,
            "corrections/weight": 1.0,
            "masks/icepop_responses": 1 / 4,
            "masks/icepop_tokens": 4 / 10,
            "masks/cut_responses_responses": 1 / 4,
            "masks/cut_responses_tokens": 2 / 10,
        }
    )


def test_shares_of_masks_are_without_what_limits_have_left_out() -> None:
    """The first two responses have tokens at a ratio of 2; IcePop would take tokens of both."""
    group, metrics = left(ICEPOP, corrections=CorrectionsConfig(worst_token_max=1.95))
    assert [one.trained_tokens for one in group] == [2, 3]
    assert metrics["corrections/rejected_responses"] == 2 / 4
    assert (metrics["masks/icepop_responses"], metrics["masks/icepop_tokens"]) == (0.0, 0.0)


def test_a_mask_sees_what_those_before_it_have_left() -> None:
    group, metrics = left(PartConfig("cut_responses"), ICEPOP, PartConfig("second_moment"))
    assert [one.trained_tokens for one in group] == [1, 3]
    assert metrics["masks/second_moment_tokens"] == 0.0
    _, alone = left(PartConfig("second_moment"))
    assert alone["masks/second_moment_tokens"] == 4 / 10


@pytest.mark.parametrize(("mean", "weights"), [("token", [1.0] * 4), ("sequence", [2 / 3] * 3 + [2.0])])
def test_the_loss_is_divided_by_what_is_left(mean: Any, weights: list[float]) -> None:
    config = settings(ICEPOP, PartConfig("cut_responses"), loss_mean=mean)
    policy: Any = ShiftedPolicy()
    [metrics] = train_on(run_of(run_config(config), policy, UpdateLoss(config)), 1, BATCH)
    [[pack]] = policy.packs
    live_T = pack.mask_T != 0
    assert sorted(pack.weight_T[live_T].tolist()) == pytest.approx(weights)
    assert pack.trained_tokens == (1, 3)
    assert metrics["policy/tokens"] == 4.0
    assert metrics["masks/icepop_tokens"] == pytest.approx(4 / 10)
