"""pi_old and corrections at every layout: whole steps, whose updates shuffle groups between the replicas."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bapo_megatron.algo.advantages import Rewards, grpo
from bapo_megatron.algo.bapo import balanced
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.config import (
    AlgorithmConfig,
    ParallelConfig,
    PartConfig,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.train import train_on
from bapo_megatron.trainer.build import agreed
from bapo_megatron.trainer.corrections import measured_once, with_old_log_probs
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import Group, Metrics, Prompt, Rollout
from tests.support.batches import MemoryBatch, in_memory, samples_of
from tests.support.layouts import layout
from tests.support.metrics import known
from tests.support.models import random_samples
from tests.support.policies import stepping, weights_of
from tests.support.runs import run_of
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

ALGORITHM = AlgorithmConfig(
    bounds=dataclasses.replace(balanced(), target=0.45),
    old_log_probs="trainer",
    importance_cap=1.5,
    reuse_epochs=2,
    updates_per_epoch=2,
)
ONE = ParallelConfig()


class Answer(NamedTuple):
    metrics: list[Metrics]
    weights: dict[str, torch.Tensor]
    old: list[np.ndarray]
    importance: list[np.ndarray]


def batch(shift: float) -> MemoryBatch:
    """Six groups of two, of versions up to the policy's, 0. Importance weights lie on both sides of the cap.

    ``shift`` is added to every log-prob of the engine.
    """
    generator = np.random.default_rng(1)
    samples = iter(random_samples(13, seed=3)[1:])
    groups = []
    for number in range(6):
        pair = [next(samples), next(samples)]
        prompt = pair[0].token_ids[:3]
        rollouts = tuple(
            Rollout(
                one.token_ids,
                (shift - 4.9 + generator.normal(size=len(one.token_ids))).astype(np.float32),
                generator.integers(-number, 1, len(one.token_ids)).astype(np.int32),
                "length" if number == 4 and reward == 1.0 else "stop",
                float(reward),
            )
            for one, reward in zip(pair, (number, 1.0), strict=True)
        )
        groups.append(Group(Prompt(number, prompt, "", ""), rollouts))
    return in_memory(*groups)


def answer(folder: Path, parallel: ParallelConfig, algorithm: AlgorithmConfig, shift: float = 0.0) -> Answer:
    config, policy = stepping(folder, parallel, algorithm)
    grouped = [[one.loaded() for one in group] for group in samples_of(batch(shift), grpo)]
    found = [one for group in with_old_log_probs(policy, grouped, 96, 1.5) for one in group]
    run = run_of(config, policy, UpdateLoss(algorithm))
    metrics = train_on(run, 1, batch(shift))
    return Answer(
        metrics, weights_of(policy), [s.old_log_probs_R for s in found], [s.importance_R for s in found]
    )


@pytest.fixture(scope="module")
def alone(qwen2: Path) -> Answer:
    [found] = run_layout(answer, ONE, qwen2, ONE, ALGORITHM)
    return found


def test_one_process_starts_every_step_at_ratio_one(alone: Answer) -> None:
    """Or the comparisons below would compare steps in which nothing happens."""
    first, *later = [row["policy/ratio_gap"] for row in alone.metrics]
    assert first < 1e-6
    assert min(later) > 1e-3
    assert alone.metrics[0]["bapo/clip_high_distance"] == 0.0  # the ratio was known
    weights = np.concatenate(alone.importance)
    assert 0.1 < np.mean(weights == 1.5) < 0.9
    assert alone.metrics[0]["rollout/engine_gap_mean"] is not None
    assert alone.metrics[1]["rollout/engine_gap_mean"] is None
    ages = ("mean", "reuse_mean", "queue_mean", "segment_mean")
    for number, row in enumerate(alone.metrics):
        mean, reuse, queue, segment = (row[f"staleness/{name}"] for name in ages)
        assert reuse == number
        assert mean == pytest.approx(reuse + queue + segment)
        assert segment > 0
        shares = [value for name, value in row.items() if name.endswith("/tokens") and "staleness" in name]
        assert sum(shares) == pytest.approx(1)


LAYOUTS = ("dp3", "pp2-vpp2", "dp2-cp2", "dp2-tp2-pp2")


@pytest.mark.parametrize("text", slow_but(LAYOUTS, "dp3", "pp2-vpp2"))
def test_every_layout_makes_the_same_updates(text: str, qwen2: Path, alone: Answer) -> None:
    parallel = layout(text).parallel
    ranks = run_layout(answer, parallel, qwen2, parallel, ALGORITHM)
    for ours in ranks:
        for mine, other, theirs in zip(ours.old, ranks[0].old, alone.old, strict=True):
            np.testing.assert_array_equal(mine, other)
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)
        for row, expected in zip(ours.metrics, alone.metrics, strict=True):
            assert known(row) == pytest.approx(known(expected), rel=1e-4, abs=1e-5)
            assert row.keys() == expected.keys()
        for name, tensor in ours.weights.items():
            torch.testing.assert_close(tensor, alone.weights[name], rtol=1e-4, atol=1e-5)


def drawn() -> list[float]:
    """A user's function that gives something else on each rank."""
    return agreed(lambda rewards: rewards.reward_N + dist.get_rank())(Rewards.of([0.0, 1.0])).tolist()


def test_all_ranks_have_the_advantages_of_rank_0() -> None:
    assert run_layout(drawn, ParallelConfig(data=2)) == [[0.0, 1.0]] * 2


def fails_on_one_replica() -> str:
    """What ends a rank whose replica measures, or not, the sample that a user's mask fails on."""

    def measure(sample: Any) -> list[float]:
        if sample.advantage > 1:
            raise ConfigError("algorithm.masks: mine failed")
        return [1.0]

    two_replicas: Any = SimpleNamespace(data_rank=dist.get_rank(), data_size=2)
    policy: Any = SimpleNamespace(pack_layout=two_replicas, sum_over_replicas=None)
    samples: Any = [SimpleNamespace(advantage=value) for value in (1.0, 2.0)]
    with pytest.raises(ConfigError, match="mine failed") as raised:
        measured_once(policy, samples, measure, 1)
    return str(raised.value)


def test_a_mask_that_fails_on_one_replica_ends_all_ranks() -> None:
    message = "algorithm.masks: mine failed"
    assert run_layout(fails_on_one_replica, ParallelConfig(data=2)) == [f"rank 1: {message}", message]


def test_without_importance_weights_the_behaviour_policy_is_not_in_the_gradient(qwen2: Path) -> None:
    """Rollouts whose log-probs are all wrong train the same, unless importance weights are asked for."""
    plain = dataclasses.replace(ALGORITHM, importance_cap=None)
    [one] = run_layout(answer, ONE, qwen2, ONE, plain)
    [other] = run_layout(answer, ONE, qwen2, ONE, plain, -0.5)
    assert other.metrics[0]["policy/kl"] != pytest.approx(one.metrics[0]["policy/kl"], rel=0.1)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, other.weights[name], rtol=0, atol=0)


GSPO = AlgorithmConfig(
    loss="gspo",
    loss_mean="sequence",
    old_log_probs="trainer",
    importance_cap=1.5,
    importance_level="sequence",
    corrections=CorrectionsConfig(geometric_min=0.7, geometric_max=1.6, off_policy_delta=0.05),
    reuse_epochs=2,
    updates_per_epoch=2,
    advantage="reinforce_plus_plus_baseline",
    masks=(PartConfig("icepop", {"low": 0.2, "high": 5.0}), PartConfig("cut_responses")),
    terms=(PartConfig("entropy_bonus", {"coefficient": 0.5}),),
)
"""Two passes over six groups of two: all masks take some, GSPO clips some, and the entropy counts."""
NOTHING = dataclasses.replace(
    GSPO, corrections=CorrectionsConfig(worst_token_min=0.999999, worst_token_max=1.000001), reuse_epochs=1
)
"""Every response is rejected in every update."""


@pytest.fixture(scope="module")
def corrected(qwen2: Path) -> Answer:
    [found] = run_layout(answer, ONE, qwen2, ONE, GSPO)
    assert isinstance(found, Answer)
    return found


def rejected(rows: list[Metrics]) -> list[float | None]:
    return [row["corrections/rejected_responses"] for row in rows]


@pytest.mark.slow
def test_both_masks_and_the_clipping_do_something(corrected: Answer) -> None:
    """Or the comparison below would compare updates in which nothing happens."""
    shares = rejected(corrected.metrics)
    assert all(share is not None and 0 < share < 1 for share in shares), shares
    clipped = [row["bapo/clip_fraction_high"] + row["bapo/clip_fraction_low"] for row in corrected.metrics]  # type: ignore[operator]
    assert max(clipped) > 0
    assert all(0 < row["corrections/weight"] <= 1.5 for row in corrected.metrics)  # type: ignore[operator]
    assert all(0 < row["masks/icepop_tokens"] < 1 for row in corrected.metrics)  # type: ignore[operator]
    assert {row["masks/cut_responses_responses"] for row in corrected.metrics} == {0.0, 1 / 6}
    assert all(row["terms/entropy_bonus"] < -0.01 for row in corrected.metrics)  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp3", "tp2-sp-pp2"])
def test_every_layout_rejects_the_same(text: str, qwen2: Path, corrected: Answer) -> None:
    parallel = layout(text).parallel
    for ours in run_layout(answer, parallel, qwen2, parallel, GSPO):
        assert rejected(ours.metrics) == rejected(corrected.metrics)
        for row, expected in zip(ours.metrics, corrected.metrics, strict=True):
            assert known(row) == pytest.approx(known(expected), rel=1e-4, abs=1e-5)
        for name, tensor in ours.weights.items():
            torch.testing.assert_close(tensor, corrected.weights[name], rtol=1e-4, atol=1e-5)


def test_updates_that_are_rejected_whole_change_nothing(qwen2: Path) -> None:
    before, parallel = HfReader(qwen2), ParallelConfig(data=2)
    for ours in run_layout(answer, parallel, qwen2, parallel, NOTHING):
        assert [row["policy/tokens"] for row in ours.metrics] == [0.0, 0.0]
        assert [row["version"] for row in ours.metrics] == [0, 0]
        assert rejected(ours.metrics) == [1.0, 1.0]
        for name, tensor in ours.weights.items():
            assert torch.equal(tensor, before.read(name))
