"""What a run with ``--rollout-only`` says of its steps, and the shares of its searches: by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from bapo_megatron.algo.advantages import grpo
from bapo_megatron.algo.bounds import balanced
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.algo.losses.clip import contribution_fn, search_groups
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.config import AlgorithmConfig, LoggingConfig, PartConfig, ReferenceKlConfig
from bapo_megatron.data.packing import pack_samples, split_into_updates
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.tensor_types import TokenStats
from bapo_megatron.trainer.records.recorder import StepClock
from bapo_megatron.trainer.rollout_only import (
    BELOW,
    SHARE,
    RolloutRecord,
    means,
    next_step,
    sampled_shares,
    shown,
)
from bapo_megatron.types import Group, Metrics, StepBatch
from tests.support.batches import header_in_memory, in_memory, samples_of
from tests.support.small_steps import group, rollout, run_config

LossMean = Literal["token", "sequence"]


def test_the_last_line() -> None:
    """Means of the steps that have a value; a dash without any."""
    rows: list[dict[str, Any]] = [
        {"step": step, "sampled/reward/mean": mean, SHARE: 0.25, BELOW: None}
        for step, mean in {1: 0.25, 2: 0.75, 3: None}.items()  # one without a group
    ]
    line = shown(means(rows))
    assert {"reward 0.500", "positive share 0.250", "searches below target -"} <= set(line)


def algorithm_of(loss_mean: LossMean = "token", **bounds: Any) -> AlgorithmConfig:
    """One search an update, of all groups of a step, or as ``bounds`` say."""
    return AlgorithmConfig(replace(balanced(), **bounds), "dr_grpo", loss_mean=loss_mean)


SKEWED = ((1, 2), (0, 4), (0, 4), (0, 10))


def test_a_step_whose_journal_file_is_lost_comes_next(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    for step in (1, 3):
        (tmp_path / f"journal/step_{step:06d}.npz").touch()
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    config: Any = SimpleNamespace(paths=RunPaths(tmp_path))
    assert next_step(config) == 2


def test_the_share_is_a_matter_of_lengths() -> None:
    # Rewards 1, 0: advantages 1/2 and -1/2, so the share is the right one's length over both lengths.
    assert share_of(sampled_group((1, 2), (0, 3))) == pytest.approx(0.4)
    assert share_of(sampled_group((1, 5), (0, 5))) == pytest.approx(0.5)
    # Rewards 1, 0, 0, 0: advantages 3/4 and three times -1/4: 3/4 * 2 over 3/4 * 2 + 1/4 * (4 + 4 + 10).
    assert share_of(sampled_group(*SKEWED)) == pytest.approx(0.25)
    # Both groups of a step: (1/2 * 2 + 3/2) / (1/2 * 5 + 6).
    assert share_of(sampled_group((1, 2), (0, 3)), sampled_group(*SKEWED)) == pytest.approx(2.5 / 8.5)


def test_in_a_mean_over_sequences_no_lengths_move_the_share() -> None:
    """The loss's weights make every response count alike: 3/4 against 3 times 1/4, whatever the lengths."""
    assert share_of(sampled_group(*SKEWED), loss_mean="sequence") == pytest.approx(0.5)
    # One without a token has no weight: 3/4 over 3/4 + 2/4.
    assert share_of(sampled_group((1, 2), (0, 4), (0, 4), (0, 0)), loss_mean="sequence") == pytest.approx(0.6)


def test_masked_tokens_do_not_count() -> None:
    masked = rollout(1.0, 6, loss_mask_R=np.arange(6) < 2)
    assert share_of(group(masked, rollout(0.0, 3))) == pytest.approx(0.4)


def test_groups_of_equal_rewards_have_no_share() -> None:
    nothing = dict.fromkeys((SHARE, BELOW))
    assert shares_of(algorithm_of(), sampled_group((1, 2), (1, 9))) == nothing
    assert shares_of(algorithm_of()) == nothing


@pytest.mark.parametrize(
    ("bounds", "below"),
    [
        ({}, 1.0),  # 1/4 as a whole
        # 20 tokens in two parts, the middles at 1, 4, 8 and 15: 3/2 over 3/2 + 8/4, which is above, and 0.
        ({"scope": "micro_batch", "bounds_tokens": 10}, 0.5),
        # In four parts of 5: (2, 4), (4), (), (10): 3/2 over 3/2 + 4/4 is above, and twice 0 below.
        ({"scope": "micro_batch", "bounds_tokens": 5}, 2 / 3),
        ({"scope": "micro_batch", "bounds_tokens": 5, "target": 0.7}, 1.0),
        # What a search sees is known only in a run, or is another share, or nothing is searched.
        ({"scope": "micro_batch"}, None),
        ({"share": "signed"}, None),
        ({"weight": "rollout_probability"}, None),
        ({"low_end": 0.6, "high_end": 1.2}, None),
    ],
)
def test_searches_of_its_parts(bounds: dict[str, Any], below: float | None) -> None:
    found = shares_of(algorithm_of(**bounds), sampled_group(*SKEWED))
    assert found[SHARE] == pytest.approx(0.25)
    assert found[BELOW] == (None if below is None else pytest.approx(below))


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": "gspo"},
        {"polarity": PapoConfig(enabled=True)},
        {"reference_kl": ReferenceKlConfig(0.1, "k1", "reward")},
        {"corrections": CorrectionsConfig(off_policy_delta=0.1)},
        {"advantage": "rloo", "masks": (PartConfig("cut_responses"),)},
    ],
)
def test_another_loss_or_other_advantages_have_no_such_searches(changed: dict[str, Any]) -> None:
    found = shares_of(replace(algorithm_of(), **changed), sampled_group(*SKEWED))
    assert (found[SHARE], found[BELOW]) == (pytest.approx(0.25), None)
    own = replace(algorithm_of(), advantage="grpo_leave_one_out")  # does not sum to 0 in a group
    assert shares_of(own, sampled_group(*SKEWED))[BELOW] is None


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_they_are_the_searches_of_a_run(loss_mean: LossMean) -> None:
    """Two passes of three updates, cut by the run's seed: the searches of their packs, at ratios of 1."""
    rng = np.random.default_rng(1)
    groups = [
        sampled_group(*((float(rng.random() < 0.5), int(rng.integers(1, 30))) for _ in range(4)))
        for _ in range(12)
    ]
    algorithm = algorithm_of(loss_mean, scope="micro_batch", bounds_tokens=60)
    algorithm = replace(algorithm, advantage="grpo", reuse_epochs=2, updates_per_epoch=3)
    samples = samples_of(in_memory(*groups), grpo)
    moved = []
    for epoch in range(2):
        for part in split_into_updates(samples, 3, (7, 5, epoch)):
            packs = pack_samples([one for group in part for one in group], 64, loss_mean)
            stats = [TokenStats(pack.old_log_prob_T, pack.old_log_prob_T) for pack in packs]
            measure = contribution_fn(algorithm.bounds)
            sums = torch.stack([measure(*both) for both in zip(stats, packs, strict=True)]).sum(0)
            found = search_groups(sums, algorithm.bounds)
            moved += [one.rounds > 0 for one in found if one.reached or one.rounds]
    ours = shares_of(algorithm, *groups, seed=7, step=5)
    assert ours[BELOW] == pytest.approx(np.mean(moved))
    assert 0.1 < np.mean(moved) < 0.9
    assert len(moved) > 12


def test_a_rollout_only_run_writes_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Uniform groups are those that were dropped and those that were kept."""
    logging = LoggingConfig(tensorboard=False)
    config = run_config(algorithm_of(), steps=1, run_dir=tmp_path, logging=logging)
    record = RolloutRecord(config, 1)
    groups = (sampled_group((1, 1), (0, 3)), sampled_group((1, 1), (1, 1)), sampled_group((0, 1), (0, 1)))
    cut = {"sampled/environment/finish_turns": 1.0}
    batch = StepBatch(groups, {"rollout/groups_dropped": 4.0, "rollout/tokens": 4.0, **cut})
    record.step(1, header_in_memory(batch), StepClock())
    record.finish()
    record.close()
    [row] = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["rollout/groups_uniform"] == 4 + 2
    assert "policy/updates" not in row
    assert (row[SHARE], row[BELOW]) == (pytest.approx(0.25), 1.0)
    told = capsys.readouterr().out
    assert "\n1 steps, means:  reward " in told
    assert told.count("positive share 0.250  searches below target 100.0%") == 2
    [event] = [row for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "episodes_cut"]
    assert event["message"].startswith("step 1: all episodes were cut at environment.max_turns")
    assert event["message"] in told


def share_of(*groups: Group, loss_mean: LossMean = "token") -> float | None:
    return shares_of(algorithm_of(loss_mean), *groups)[SHARE]


def shares_of(algorithm: AlgorithmConfig, *groups: Group, seed: int = 0, step: int = 1) -> Metrics:
    return sampled_shares(header_in_memory(StepBatch(groups, {})).groups, algorithm, seed, step)


def sampled_group(*responses: tuple[float, int]) -> Group:
    """Responses of (reward, length)."""
    return group(*(rollout(reward, length, 0.0, 0) for reward, length in responses))
