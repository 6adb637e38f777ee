"""What a run with ``--rollout-only`` says of its steps, and whether BAPO can act on their groups: by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from bapo_megatron.algo.advantages import group_advantages
from bapo_megatron.algo.bounds import BoundsConfig, fixed, search_bounds
from bapo_megatron.algo.surrogate import contribution_sums
from bapo_megatron.config import AlgorithmConfig, DataConfig, LoggingConfig, ModelConfig, RunConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.trainer import rollout_only
from bapo_megatron.trainer.records.recorder import StepClock
from bapo_megatron.trainer.rollout_only import (
    SHARE,
    RolloutRecord,
    outlook,
    positive_share,
    step_line,
    summary,
)
from bapo_megatron.types import Group, Prompt, Rollout, StepBatch
from tests.support.batches import header_in_memory

METRICS: dict[str, float | None] = {
    "reward/mean": 0.25,
    "reward/correct_fraction": 0.5,
    "rollout/length_mean": 17.6,
    "rollout/length_max": 64.0,
    "rollout/truncated_fraction": 0.125,
    "rollout/groups_sampled": 9.0,
    "rollout/groups_uniform": 3.0,
    "time/tokens_per_s": 1234.5,
    "reward/failures": 2.0,
    "reward/timeouts": 1.0,
}


def test_the_line_of_a_step() -> None:
    assert step_line(3, 12, METRICS) == (
        "step  3/12  reward 0.250  right 50.0%  length 18 (max 64, cut off 12.5%)  uniform 3 of 9 groups  "
        "tokens/s 1234  failed 2 (timed out 1)"
    )
    assert "reward -  right -  length - (max -, cut off -)" in step_line(1, 1, {})


def test_the_table() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, **METRICS},
        {"step": 2, **METRICS, "reward/mean": 0.75, "reward/failures": 5.0},
        {"step": 3, **dict.fromkeys(METRICS)},  # a step without a group
    ]
    events = [{"kind": kind} for kind in ("start", "engine_ready", "engine_lost", "resume", "engine_lost")]
    cells = [re.split(r" {2,}", line) for line in summary(rows, events)]
    lines = {name: values for name, *values in cells}
    assert lines["3 steps"] == ["mean", "lowest", "highest"]
    assert lines["reward"] == ["0.500", "0.250", "0.750"]
    assert lines["cut off"] == ["12.5%", "12.5%", "12.5%"]
    assert lines["rewards failed"] == ["3.5", "2", "5"]
    assert [*summary(rows, events)][-1] == "events: engine_lost 2"
    assert not any("events" in line for line in summary(rows, events[:2]))


def test_uniform_groups_are_those_dropped_and_those_kept(tmp_path: Path) -> None:
    config = RunConfig(
        name="x",
        model=ModelConfig(tmp_path),
        data=DataConfig(tmp_path),
        steps=2,
        run_dir=tmp_path,
        logging=LoggingConfig(tensorboard=False),
    )
    groups = tuple(group(*rewards) for rewards in ((1, 1), (0, 1), (0, 0)))
    record = RolloutRecord(config, 1)
    batch = StepBatch(groups, {"rollout/groups_dropped": 4.0, "rollout/tokens": 6.0})
    record.step(1, header_in_memory(batch), StepClock())
    record.close()
    [row] = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["rollout/groups_uniform"] == 4 + 2
    assert "policy/updates" not in row


def group(*rewards: float) -> Group:
    column = np.zeros(1)
    rollouts = [Rollout(column, column, column, "stop", reward) for reward in rewards]
    return Group(Prompt(0, np.zeros(1, np.int32), "", "test"), tuple(rollouts))


@pytest.mark.parametrize(
    ("rows", "files", "expected"),
    [([], [], 1), ([1, 2], [1, 2], 3), ([1, 2], [1, 2, 3], 3), ([1, 2, 3], [1, 3], 2), ([1], [], 1)],
)
def test_a_step_is_done_with_its_file_and_its_metrics(
    rows: list[int], files: list[int], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "journal").mkdir()
    for step in files:
        (tmp_path / f"journal/step_{step:06d}.npz").touch()
    if rows:
        (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in rows))
    config: Any = SimpleNamespace(directory=tmp_path)
    assert rollout_only.next_step(config) == expected


BOUNDS = BoundsConfig(target=0.4)


def test_the_share_is_a_matter_of_lengths() -> None:
    # Rewards 1, 0: advantages 1/2 and -1/2, so the share is the right one's length over both lengths.
    assert share_of(sampled_group((1, 2), (0, 3)), kind="dr_grpo") == pytest.approx(0.4)
    assert share_of(sampled_group((1, 5), (0, 5)), kind="grpo") == pytest.approx(0.5)
    # Rewards 1, 0, 0, 0: advantages 3/4 and three times -1/4: 3/4 * 2 over 3/4 * 2 + 1/4 * (4 + 4 + 10).
    assert share_of(sampled_group((1, 2), (0, 4), (0, 4), (0, 10)), kind="dr_grpo") == pytest.approx(0.25)
    # Both groups of a step: (1/2 * 2 + 3/2) / (1/2 * 5 + 6).
    both = [sampled_group((1, 2), (0, 3)), sampled_group((1, 2), (0, 4), (0, 4), (0, 10))]
    assert share_of(*both, kind="dr_grpo") == pytest.approx(2.5 / 8.5)


def test_in_a_mean_over_sequences_no_lengths_move_the_share() -> None:
    """The loss's weights make every response count alike: 3/4 against 3 times 1/4, whatever the lengths."""
    skewed = sampled_group((1, 2), (0, 4), (0, 4), (0, 10))
    assert share_of(skewed, kind="dr_grpo", loss_mean="sequence") == pytest.approx(0.5)
    assert share_of(skewed, kind="grpo", loss_mean="sequence") == pytest.approx(0.5)
    # One without a token has no weight: 3/4 over 3/4 + 2/4.
    assert share_of(sampled_group((1, 2), (0, 4), (0, 4), (0, 0)), loss_mean="sequence") == pytest.approx(0.6)


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_the_share_is_the_contribution_of_the_search(loss_mean: Literal["token", "sequence"]) -> None:
    """That of the packs of an update, at ratios of 1."""
    groups = [sampled_group((1, 2), (0, 3)), sampled_group((1, 2), (0, 4), (0, 4), (0, 10))]
    samples = []
    for rollouts in (one.rollouts for one in groups):
        advantages = group_advantages([one.reward for one in rollouts], "grpo")
        for one, value in zip(rollouts, advantages, strict=True):
            ids = np.zeros(1 + len(one.log_probs_R), np.int32)
            samples.append(Sample(ids, one.log_probs_R, one.versions_R, float(value)))
    start, sums = fixed(0.6, 1.2), torch.zeros(2, dtype=torch.float64)
    for pack in pack_samples(samples, 12, loss_mean):
        same_T = torch.zeros_like(pack.mask_T)
        sums += contribution_sums(same_T, pack.advantage_T, same_T, pack.weight_T, start)
    share = search_bounds(sums, start).contribution
    assert share_of(*groups, loss_mean=loss_mean) == pytest.approx(share)


def test_masked_tokens_do_not_count() -> None:
    one = sampled_group((1, 6), (0, 3))
    mask_R = np.array([True, True, False, False, False, False])
    masked = Group(one.prompt, (replace(one.rollouts[0], loss_mask_R=mask_R), one.rollouts[1]))
    assert share_of(masked, kind="dr_grpo") == pytest.approx(2 / 5)


def test_groups_of_equal_rewards_have_no_share() -> None:
    assert share_of(sampled_group((1, 2), (1, 9)), kind="grpo") is None
    assert share_of(kind="grpo") is None


@pytest.mark.parametrize(
    ("shares", "start", "end"),
    [
        ([0.3, 0.5], "BAPO can act on this data:", "hold 0.400 of the gradient at ratios of 1, "
         "below the target of 0.4 in 1 of 2 steps"),
        ([0.3, 0.5, 0.4], "BAPO can act on this data at times, and will mostly equal fixed(0.6, 1.2):",
         "in 1 of 3 steps"),
        ([0.4, 0.5], "BAPO will equal fixed(0.6, 1.2) on this data,", "in 0 of 2 steps"),
    ],
)  # fmt: skip
def test_the_sentence(shares: list[float], start: str, end: str) -> None:
    said = outlook(shares, BOUNDS) or ""
    assert said.startswith(start)
    assert said.endswith(end)


@pytest.mark.parametrize(
    ("bounds", "rest"),
    [
        (BOUNDS, "BAPO will equal fixed(0.6, 1.2) until the data are stale: positive tokens hold 0.500"),
        (replace(BOUNDS, scope="micro_batch", bounds_tokens=100),
         "BAPO acts only on which responses each search happens to see: positive tokens hold 0.500"),
    ],
)  # fmt: skip
def test_the_sentence_of_a_mean_over_sequences(bounds: BoundsConfig, rest: str) -> None:
    said = outlook([0.5, 0.5], bounds, "sequence") or ""
    start = "with algorithm.loss_mean=sequence no lengths move the share from 1/2, so "
    assert said.startswith(start + rest)
    # With a target above 1/2 the search always has something to do.
    can_act = outlook([0.5, 0.5], replace(bounds, target=0.6), "sequence") or ""
    assert can_act.startswith("BAPO can act on this data:")


def test_no_sentence_where_the_share_does_not_decide() -> None:
    assert outlook([], BOUNDS) is None
    assert outlook([0.3], fixed(0.9, 1.2)) is None
    assert outlook([0.3], replace(BOUNDS, share="signed")) is None
    assert outlook([0.3], replace(BOUNDS, weight="rollout_probability")) is None


@pytest.mark.parametrize(
    ("loss_mean", "share", "start"),
    [
        ("token", 0.25, "BAPO can act on this data: positive tokens hold 0.250"),
        ("sequence", 0.5, "with algorithm.loss_mean=sequence no lengths move the share from 1/2"),
    ],
)
def test_a_rollout_only_run_says_it(
    loss_mean: Literal["token", "sequence"],
    share: float,
    start: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = RunConfig(
        name="x",
        model=ModelConfig(tmp_path),
        data=DataConfig(tmp_path),
        steps=1,
        run_dir=tmp_path,
        algorithm=AlgorithmConfig(loss_mean=loss_mean),
        logging=LoggingConfig(tensorboard=False),
    )
    record = RolloutRecord(config, 1)
    batch = StepBatch((sampled_group((1, 1), (0, 3)),), {"rollout/tokens": 4.0})
    record.step(1, header_in_memory(batch), StepClock())
    record.finish()
    record.finish()  # a finished run that is started again says it again, and records it once
    record.close()
    [row] = read_jsonl(tmp_path / "metrics.jsonl")
    assert row[SHARE] == pytest.approx(share)
    [event] = [row for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "bapo_outlook"]
    assert event["message"].startswith(start)
    assert event["message"] in capsys.readouterr().out


def share_of(
    *groups: Group,
    kind: Literal["grpo", "dr_grpo"] = "grpo",
    loss_mean: Literal["token", "sequence"] = "token",
) -> float | None:
    return positive_share(header_in_memory(StepBatch(groups, {})).groups, kind, loss_mean)


def sampled_group(*responses: tuple[float, int]) -> Group:
    """Responses of (reward, length)."""
    rollouts = tuple(
        Rollout(np.zeros(n, np.int32), np.zeros(n), np.zeros(n, np.int32), "stop", reward)
        for reward, n in responses
    )
    return Group(Prompt(0, np.zeros(1, np.int32), "", "test"), rollouts)
