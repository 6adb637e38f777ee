"""Corrections: which responses are rejected and by which ratio, and what an update is then divided by."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.algo.bapo import BoundsConfig, balanced, fixed
from bapo_megatron.algo.corrections import (
    CorrectionsConfig,
    is_off_policy,
    is_outside,
    truncated_sequence_importance,
)
from bapo_megatron.algo.losses import LOSSES, build_loss, load_loss
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.train import update
from bapo_megatron.trainer.corrections import METRICS, corrected, with_old_log_probs
from bapo_megatron.trainer.update_loss import UpdateLoss
from tests.support.runs import run_of
from tests.support.small_steps import ShiftedPolicy, run_config

pytestmark = pytest.mark.usefixtures("one_process_group")


def sample(ids: list[int], advantage: float, version: int = 3, mask: list[bool] | None = None) -> Sample:
    """A prompt of one token, a response whose token 10 + k has pi / pi_rollout = 2^(k / 2)."""
    count = len(ids)
    return Sample(
        np.array([1, *ids], np.int32),
        np.full(count, -3.0, np.float32),
        np.full(count, version, np.int32),
        advantage,
        loss_mask_R=None if mask is None else np.array(mask),
    )


LOW, HIGH = [8, 8, 8], [12, 12]  # ratios 1/2 and 2 at every token
GROUPS = [[sample(LOW, -1.0), sample(LOW, 1.0)], [sample(HIGH, -2.0), sample([10, 10], 2.0)]]


def algorithm(**rest: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{"bounds": fixed(0.1, 10.0), **rest})


def lengths(groups: Sequence[Sequence[Sample]]) -> list[list[int]]:
    return [[one.response_tokens for one in group] for group in groups]


APART = [4.0, 1.0, 0.25]  # the mean of their logarithms is 0
HALF_TO_2 = {"geometric_min": 0.5, "geometric_max": 2.0}


@pytest.mark.parametrize(
    ("ratios", "limits", "outside"),
    [
        (APART, {}, False),
        (APART, {"geometric_min": 0.99}, False),
        (APART, {"geometric_max": 1.01}, False),
        (APART, {"worst_token_min": 0.26}, True),
        (APART, {"worst_token_min": 0.24}, False),
        (APART, {"worst_token_max": 3.9}, True),
        (APART, {"worst_token_max": 4.1}, False),
        (APART, {"worst_token_min": 0.24, "worst_token_max": 3.9}, True),
        ([4.0, 1.0], HALF_TO_2, False),
        ([4.1, 1.0], HALF_TO_2, True),
        ([0.25, 1.0], HALF_TO_2, False),
        ([0.24, 1.0], HALF_TO_2, True),
        ([math.nan, 1.0], HALF_TO_2, True),
        ([], HALF_TO_2, False),
    ],
)
def test_ranges_of_worst_token_and_mean(ratios: list[float], limits: dict[str, float], outside: bool) -> None:
    assert is_outside(np.log(ratios), CorrectionsConfig(**limits)) is outside


def test_the_limits_of_verl_are_those_of_the_inverse_ratio() -> None:
    """Its `seq_mean_k1` keeps log(lower) <= mean(log pi_rollout - log pi_old) <= log(upper)
    (docs/customize.md#where-the-numbers-differ)."""
    lower, upper = 0.9, 1.3
    ours = CorrectionsConfig(geometric_min=1 / upper, geometric_max=1 / lower)
    same = CorrectionsConfig(geometric_min=lower, geometric_max=upper)
    drawn = np.random.default_rng(0).normal(0.0, 0.3, (264, 6))
    theirs = [not math.log(lower) <= float(np.mean(-row)) <= math.log(upper) for row in drawn]
    assert [is_outside(row, ours) for row in drawn] == theirs
    assert 0 < sum(theirs) < 264
    assert sum(a != is_outside(row, same) for a, row in zip(theirs, drawn, strict=True)) > 20


@pytest.mark.parametrize(
    ("advantage", "gap", "rejected"),
    [
        (-1, 0.2, True),
        (-1, 0.1, False),
        (-1, -0.2, False),
        (0, 0.2, False),
        (1, 0.2, False),
        (-1, math.nan, True),
    ],
)
def test_off_policy_sequence_mask_by_hand(advantage: float, gap: float, rejected: bool) -> None:
    assert is_off_policy(advantage, gap, 0.1) is rejected


@pytest.mark.parametrize(("cap", "weight"), [(10.0, 8.0), (3.0, 3.0)])
def test_the_weight_of_a_response_is_the_product_of_its_trained_tokens(cap: float, weight: float) -> None:
    """Ratios 2, 4 and (not trained) 100: 8, or the cap."""
    log_ratio, trained = np.log(np.array([2, 4, 100], np.float32)), np.array([True, True, False])
    found = truncated_sequence_importance(log_ratio - 3, np.full(3, -3.0, np.float32), trained, cap)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([weight] * 3)


def with_old(level: str = "token", cap: float | None = None) -> list[list[Sample]]:
    policy: Any = ShiftedPolicy()
    return with_old_log_probs(policy, GROUPS, 64, cap, level)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("level", "weights"), [("token", [0.5, 0.5, 2.0, 1.0]), ("sequence", [1 / 8, 1 / 8, 3.0, 1])]
)
def test_importance_weights_by_token_and_by_response(level: str, weights: list[float]) -> None:
    """Ratios 1/2 three times, 2 twice (a product of 4, capped at 3), and 1."""
    for one, weight in zip(chain(*with_old(level, 3.0)), weights, strict=True):
        assert one.importance_R is not None
        assert one.importance_R.tolist() == pytest.approx([weight] * one.response_tokens)


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"geometric_min": 0.6}, [[], [2, 2]]),
        ({"geometric_max": 1.9}, [[3, 3], [2]]),
        ({"worst_token_min": 0.6, "worst_token_max": 1.9}, [[], [2]]),
    ],
)
def test_rejection_by_the_ratio_needs_no_pass(limits: dict[str, float], left: list[list[int]]) -> None:
    settings = algorithm(old_log_probs="trainer", corrections=CorrectionsConfig(**limits))
    policy: Any = ShiftedPolicy()
    groups, metrics = corrected(policy, with_old(), settings, 64, False)
    assert (lengths(groups), policy.calls) == (left, [])
    kept = [*chain(*left)]
    assert metrics == pytest.approx(
        dict(zip(METRICS, (1 - len(kept) / 4, 1 - sum(kept) / 10, 1.0), strict=True))
    )


@pytest.mark.parametrize(
    ("rest", "on_policy", "left", "calls"),
    [
        ({}, False, [[3], [2, 2]], ["token_sums"]),
        ({}, True, [[3, 3], [2, 2]], ["old_sums"]),
        ({"known_ratio": False}, True, [[3], [2, 2]], ["token_sums"]),
    ],
)
def test_which_policy_masks(
    rest: dict[str, Any], on_policy: bool, left: list[list[int]], calls: list[str]
) -> None:
    """Only the first response has A < 0 and a gap of +ln 2; pi_old is pi_rollout, so its known gap is 0."""
    settings = algorithm(corrections=CorrectionsConfig(off_policy_delta=0.1), **rest)
    policy: Any = ShiftedPolicy()
    groups, metrics = corrected(policy, GROUPS, settings, 64, on_policy)
    assert (lengths(groups), policy.calls) == (left, calls)
    assert metrics["corrections/rejected_tokens"] == pytest.approx(1 - sum(chain(*left)) / 10)


def test_off_policy_sequence_mask_compares_with_pi_rollout_not_pi_old() -> None:
    """pi_old is pi, so at a known ratio the gap is that of trainer and engine."""
    settings = algorithm(old_log_probs="trainer", corrections=CorrectionsConfig(off_policy_delta=0.1))
    policy: Any = ShiftedPolicy()
    groups, _ = corrected(policy, with_old(), settings, 64, True)
    assert (lengths(groups), policy.calls) == ([[3], [2, 2]], ["old_sums"])


def test_both_masks_together_measure_what_the_first_one_leaves() -> None:
    """The third response is rejected by its mean ratio of 2, the first by its gap."""
    both = CorrectionsConfig(geometric_max=1.9, off_policy_delta=0.1)
    settings = algorithm(old_log_probs="trainer", corrections=both)
    policy: Any = ShiftedPolicy()
    groups, metrics = corrected(policy, with_old(), settings, 64, False)
    assert (lengths(groups), policy.calls) == ([[3], [2]], ["token_sums"])
    assert metrics["corrections/rejected_responses"] == 0.5


def test_masked_tokens_do_not_count_for_rejection() -> None:
    """The tool's token has ratio 2^45; the mean of the others is 1."""
    one = sample([10, 100, 10], -1.0, mask=[True, False, True])
    settings = algorithm(
        old_log_probs="trainer",
        corrections=CorrectionsConfig(geometric_max=1.1, worst_token_max=1.1, off_policy_delta=0.01),
    )
    policy: Any = ShiftedPolicy()
    [[old]] = with_old_log_probs(policy, [[one]], 64, 2.0, "sequence")
    groups, metrics = corrected(policy, [[old]], settings, 64, False)
    assert lengths(groups) == [[3]]
    assert metrics == dict(zip(METRICS, (0.0, 0.0, 1.0), strict=True))


def run_of_settings(settings: AlgorithmConfig, hold: bool = False) -> Any:
    return run_of(run_config(settings), ShiftedPolicy(), UpdateLoss(settings, hold))


def run(settings: AlgorithmConfig, groups: list[list[Sample]], hold: bool = False) -> tuple[Any, Any]:
    """One update of a run; its metrics and its policy."""
    made = run_of_settings(settings, hold)
    return update(made, groups, 10), made.policy


@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_rejected_responses_leave_every_count(mean: Any) -> None:
    """What is left trains as if the rejected response had never been sampled.

    Loss of a mean over tokens: -(3 * 1/2 * 1 + 2 * 2 * -2 + 2 * 2) / 7, over responses: -(1/2 - 4 + 2) / 3.
    """
    masked = algorithm(loss_mean=mean, corrections=CorrectionsConfig(off_policy_delta=0.1))
    metrics, policy = run(masked, GROUPS)
    plain, fewer = run(algorithm(loss_mean=mean), [GROUPS[0][1:], GROUPS[1]])
    assert metrics["policy/tokens"] == 7.0
    assert metrics["policy/loss"] == pytest.approx((8 - 1.5 - 4) / 7 if mean == "token" else 1.5 / 3)
    assert {name: metrics[name] for name in plain} == plain
    for name in ("mask_T", "weight_T", "advantage_T", "sequence_T"):
        ours, theirs = (torch.cat([getattr(p, name) for p in one.packs[0]]) for one in (policy, fewer))
        assert torch.equal(ours, theirs)
    assert metrics["corrections/rejected_responses"] == 0.25
    assert metrics["corrections/rejected_tokens"] == pytest.approx(0.3)


def settings_of(loss: str, scope: Any, **rest: Any) -> AlgorithmConfig:
    """A run with this loss, at bounds that it reads."""
    kind = load_loss(loss).bounds  # type: ignore[attr-defined]
    searched = dataclasses.replace(balanced(), scope=scope)
    bounds = {"searched": searched, "fixed": fixed(0.8, 1.2), "unused": BoundsConfig()}[kind]
    return AlgorithmConfig(loss=loss, bounds=bounds, **rest)


@pytest.mark.parametrize("papo", [False, True])
@pytest.mark.parametrize(
    ("loss", "scope", "hold"),
    [
        *((loss, "update", hold) for loss in sorted(LOSSES) for hold in (False, True)),
        *((AlgorithmConfig().loss, scope, False) for scope in ("micro_batch", "lagged")),
    ],
)
def test_corrections_with_every_loss_and_scope(loss: str, scope: str, hold: bool, papo: bool) -> None:
    """Whatever is searched is searched among the responses that are left."""
    rest: dict[str, Any] = {"polarity": PapoConfig(papo)}
    masked = settings_of(loss, scope, corrections=CorrectionsConfig(off_policy_delta=0.1), **rest)
    metrics, _ = run(masked, GROUPS, hold)
    plain, _ = run(settings_of(loss, scope, **rest), [GROUPS[0][1:], GROUPS[1]], hold)
    assert {name: metrics[name] for name in plain} == plain
    assert metrics["corrections/rejected_responses"] == 0.25


def test_an_update_whose_responses_are_all_rejected_takes_no_step() -> None:
    """Policy, version, lagged bounds and PAPO's memory stay; of its metrics only the corrections' exist. The
    recorder makes a warning of these (test_recorder.py)."""
    settings = AlgorithmConfig(
        bounds=dataclasses.replace(balanced(), scope="lagged"),
        polarity=PapoConfig(True, memory=0.0),
        corrections=CorrectionsConfig(off_policy_delta=0.1),
        loss_mean="sequence",
    )
    made = run_of_settings(settings)
    update(made, GROUPS, 10)
    before = made.update_loss.state()
    metrics = update(made, [[sample(LOW, -1.0), sample(LOW, -2.0)]], 10)
    assert made.update_loss.state() == before
    assert (made.policy.version, made.policy.calls.count("update"), metrics["version"]) == (11, 1, 11)
    assert metrics == {
        "version": 11,
        "policy/tokens": 0.0,
        METRICS[0]: 1.0,
        METRICS[1]: 1.0,
        METRICS[2]: None,
    }
    later = update(made, GROUPS, 10)
    assert later["version"] == 12
    assert metrics.keys() <= later.keys()


class BrokenPolicy(ShiftedPolicy):
    """One whose log-prob of a token is nan."""

    def stats(self, batch: MicroBatch) -> TokenStats:
        found = super().stats(batch)
        found.log_prob_T[0] = math.nan
        return found


@pytest.mark.parametrize("limit", [{"off_policy_delta": 0.1}, {"worst_token_min": 0.1}])
def test_broken_weights_end_the_run_instead_of_rejecting_their_responses(limit: dict[str, float]) -> None:
    policy: Any = BrokenPolicy()
    settings = algorithm(old_log_probs="trainer", corrections=CorrectionsConfig(**limit))
    with pytest.raises(FloatingPointError, match="have overflowed"):
        groups = GROUPS if "off_policy_delta" in limit else with_old_log_probs(policy, GROUPS, 64, None)
        corrected(policy, groups, settings, 64, False)


def test_the_mean_weight_is_that_of_the_tokens_that_are_left() -> None:
    """Without the last group's first response: (3 + 3) * 1/2 and 2 * 1 of 8 tokens."""
    settings = algorithm(
        old_log_probs="trainer", importance_cap=3.0, corrections=CorrectionsConfig(geometric_max=1.9)
    )
    policy: Any = ShiftedPolicy()
    _, metrics = corrected(policy, with_old(cap=3.0), settings, 64, False)
    assert metrics["corrections/weight"] == pytest.approx(5 / 8)


def test_weights_are_measured_where_nothing_is_rejected() -> None:
    """1/2 for six tokens, 2 for two, 1 for two."""
    settings = algorithm(old_log_probs="trainer", importance_cap=3.0)
    policy: Any = ShiftedPolicy()
    groups, metrics = corrected(policy, with_old(cap=3.0), settings, 64, False)
    assert lengths(groups) == [[3, 3], [2, 2]]
    assert metrics == pytest.approx(dict(zip(METRICS, (0.0, 0.0, 9 / 10), strict=True)))


def test_vespo_refuses_a_second_importance_weight() -> None:
    settings = AlgorithmConfig(loss="vespo", importance_cap=2.0, old_log_probs="trainer")
    with pytest.raises(
        ConfigError, match=r"importance_cap=2.0 would weigh vespo's loss beside W: leave it out"
    ):
        build_loss(settings)
