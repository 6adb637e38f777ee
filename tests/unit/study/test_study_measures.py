"""What a study reads off a run, with numbers worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.commands.report.data import MetricTable, RunRecord, read_run
from bapo_megatron.runtime.jsonl_log import Row
from benchmarks.study.measures import (
    ArmRecord,
    best_and_last,
    collapsed,
    entropies_at_equal_reward,
    entropy_offset,
    first_entropy,
    raised,
    read_arm,
    spike_rate,
    spikes,
    stale_updates,
    window_of,
)
from benchmarks.study.plan import Arm


def test_windows_by_hand() -> None:
    assert [window_of(steps) for steps in (1, 9, 20, 39, 50, 400)] == [1, 1, 2, 3, 5, 5]
    values = np.arange(1.0, 21.0)
    assert best_and_last(values) == (19.5, 19.5)
    values[-1] = np.nan  # the last that exist
    assert best_and_last(-values) == (-1.5, -18.5)
    assert all(map(math.isnan, best_and_last(np.full(3, np.nan))))


def test_collapses_by_hand() -> None:
    assert collapsed(np.array([0.2, 0.8, 0.39]))
    assert not collapsed(np.array([0.2, 0.8, 0.4]))  # half of the best is not below it
    assert not collapsed(np.array([0.2, 0.1, 0.3]))
    assert not collapsed(np.full(3, np.nan))


def test_spikes_by_hand() -> None:
    calm = np.ones(10)
    assert spikes(calm) == 0
    calm[7] = 3.0  # three times the median is not above it
    assert spikes(calm) == 0
    calm[7] = 3.01
    assert spikes(calm) == 1
    calm[2] = 100.0  # too early to know what is usual
    assert spikes(calm) == 1
    calm[9] = np.nan  # too large for a number
    assert spikes(calm) == 2


def test_the_median_of_spikes_runs() -> None:
    """Norms that have grown for good are spikes only until most of the window has their size."""
    grown = np.concatenate([np.ones(30), np.full(30, 10.0)])
    assert spikes(grown) == 5  # the median of 10 is 1 while at most 4 of them are 10, and 5.5 at 5


def norms(values: Sequence[float], per_step: int) -> RunRecord:
    """A run with these gradient norms, so many updates in each step."""
    updates = [{"step": 1 + n // per_step, "policy/grad_norm": value} for n, value in enumerate(values)]
    return RunRecord(Path("run"), MetricTable([]), MetricTable(updates), [], {})


def test_what_comes_back_in_every_step_is_no_spike() -> None:
    """The first pass over each batch has large norms, the others small ones: a saw, all of 30 steps long."""
    saw = [9.0, 1.0, 0.5, 0.4] * 30
    assert spike_rate(norms(saw, 4)) == 0.0
    saw[81] = 3.5  # the second place of the 21st step; the first place has more, always
    assert spike_rate(norms(saw, 4)) == pytest.approx(100 / 120)
    assert math.isnan(spike_rate(norms([float("nan")] * 8, 4)))


def arm_with(reward: Sequence[float], entropy: Sequence[float]) -> ArmRecord:
    curves = {"reward": np.array(reward, float), "entropy": np.array(entropy, float)}
    return ArmRecord("grpo", 8, 0, {}, curves)


def test_the_entropy_offset_by_hand() -> None:
    """On the line 0.9 - 0.5 r the other, 0.05 nats below it the one, at other rewards and with a step lost.

    And off the lines: rewards alike, so the offset is the difference of the means, 0.7 - 0.4.
    """
    other = arm_with([0.2, 0.4, 0.8], [0.8, 0.7, 0.5])
    one = arm_with([0.4, math.nan, 0.6], [0.65, 9.0, 0.55])
    assert entropy_offset(one, other) == pytest.approx(-0.05)
    assert entropy_offset(other, one) == pytest.approx(0.05)
    high, low = arm_with([0.1, 0.2], [0.9, 0.5]), arm_with([0.1, 0.2], [0.3, 0.5])
    assert entropy_offset(high, low) == pytest.approx(0.3)
    assert math.isnan(entropy_offset(arm_with([0.2], [0.8]), arm_with([0.2, 0.3, 0.4], [0.8, 0.7, 0.6])))


def test_entropy_at_equal_reward_by_hand() -> None:
    """The slow arm's best is 0.4; the fast one is first there in its second step, at 0.8 nats."""
    slow = arm_with([0.1, 0.2, 0.3, 0.4], [1.0, 0.9, 0.7, 0.6])
    fast = arm_with([0.3, 0.5, 0.7, 0.9], [1.0, 0.8, 0.4, 0.1])
    assert entropies_at_equal_reward(slow, fast) == (0.6, 0.8)
    assert entropies_at_equal_reward(fast, slow) == (0.8, 0.6)
    empty = arm_with([np.nan] * 4, [1.0] * 4)
    assert all(map(math.isnan, entropies_at_equal_reward(slow, empty)))


def test_a_step_without_a_batch_counts_in_neither_curve() -> None:
    """The third step has a reward and no entropy: the level 0.9 is first reached with one in the fourth."""
    broken = arm_with([0.1, 0.2, 0.9, 0.9], [1.0, 0.9, np.nan, 0.5])
    assert entropies_at_equal_reward(broken, broken) == (0.5, 0.5)


def test_raised_tokens_by_hand() -> None:
    """Shares 0.03 and 0.01 and none: mean 0.04 / 3; probabilities 0.3 and 0.1, weighted 3 to 1: 0.25."""
    rows: list[Row] = [
        {"raised/tokens": 0.03, "raised/probability": 0.3},
        {"raised/tokens": 0.01, "raised/probability": 0.1},
        {"raised/tokens": 0.0, "raised/probability": None},
        {},
    ]
    assert list(raised(rows)) == pytest.approx([0.04 / 3, 0.25])
    assert all(map(math.isnan, raised([{}])))


@pytest.fixture
def arm(tmp_path: Path) -> Arm:
    """Four steps of two passes: the reward rises, the entropy halves."""
    steps = [
        {
            "step": step,
            "reward/mean": 0.2 * step,
            "policy/entropy": 1.0 / step,
            "rollout/length_mean": 8.0 * step,
        }
        for step in range(1, 5)
    ]
    updates = [
        {
            "step": step,
            "epoch": epoch,
            "policy/entropy": 0.4 if epoch else 1.6 - 0.3 * (step - 1),
            "policy/grad_norm": 1.0,
            "bapo/rounds": 3 if epoch and step == 2 else 0,
            "bapo/clip_low_negative": 0.9 if epoch and step == 2 else 0.6,
            "bapo/clip_high_positive": 1.6 if epoch and step == 2 else 1.2,
            "bapo/clip_fraction_high": 0.01 * epoch,
            "bapo/clip_fraction_low": 0.02 * epoch,
            "quadrant/positive_low/contribution": 0.1,
            "quadrant/positive_high/contribution": (0.26, 0.34, 0.3, 0.3)[step - 1] if epoch else 0.4,
            "bapo/one_sign_tokens": 0.5 if epoch and step == 4 else 0.0,
            "policy/tokens": 100.0 * step * epoch,
            "raised/tokens": 0.04 * epoch,
            "raised/probability": 0.2 if epoch else None,
            "ratio/1.2-1.5/tokens": 0.04 * epoch,
            "ratio/1.2-1.5/probability": 0.3,
        }
        for step in range(1, 5)
        for epoch in range(2)
    ]
    evaluations = [{"step": 0, "eval/mean": 0.25}, {"step": 4, "eval/mean": 0.75}]
    for name, rows in (("metrics", steps), ("updates", updates), ("evaluations", evaluations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Arm("grpo", 2, 7, 4, tmp_path, ())


def test_an_arm_by_hand(arm: Arm) -> None:
    """First passes are in none of what is measured of stale tokens."""
    record = read_arm(arm)
    assert (record.method, record.passes, record.seed) == ("grpo", 2, 7)
    assert record.figures == pytest.approx(
        {
            "mean_reward": 0.5,
            "best_reward": 0.8,
            "final_reward": 0.8,
            "collapsed": 0.0,
            "first_entropy": 1.6,
            "entropy_kept": 0.25 / 1.6,
            "spikes": 0.0,  # four steps are too few to know what is usual
            "clipped": 0.03,
            "positive_share": 0.4,
            "raised_tokens": 0.04,
            "raised_probability": 0.2,
            "clip_low": 0.675,
            "clip_high": 1.3,
            "moved": 0.25,
            "below_target": 0.25,  # 0.36, 0.44, and twice 0.4
            "one_sign": 0.125,
            "update_tokens": 250.0,
            "response_tokens": 20.0,
            "held_out": 0.75,
        }
    )
    assert record.curves["clip_low"].tolist() == [0.6, 0.9, 0.6, 0.6]
    assert record.curves["clipped"] == pytest.approx([0.03] * 4)
    assert record.curves["profile"][9] == pytest.approx(0.3)  # the bin from 1.2 to 1.5


def test_one_pass_has_no_stale_updates(arm: Arm) -> None:
    run = read_run(arm.run_dir)
    assert [row["epoch"] for row in stale_updates(run)] == [1] * 4
    first = [row for row in run.updates.rows() if not row["epoch"]]
    on_policy = RunRecord(run.run_dir, run.steps, MetricTable(first), [], {})
    assert stale_updates(on_policy) == first
    assert first_entropy(on_policy) == 1.6


def test_what_was_not_measured_is_not_a_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    figures = read_arm(Arm("grpo", 1, 0, 1, tmp_path, ())).figures
    assert figures["final_reward"] == 0.5
    for name in ("held_out", "spikes", "entropy_kept", "clipped", "positive_share", "raised_tokens", "moved"):
        assert math.isnan(figures[name]), name
