"""What a study reads off a run and off its seeds, with numbers worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.commands.report.data import RunRecord, read_run
from benchmarks.study.measures import (
    collapsed,
    curves_of,
    drawdown,
    figures_of,
    first_and_last,
    in_blocks,
    read_arm,
    spike_rate,
    spikes,
    window_of,
)
from benchmarks.study.paired import paired_effect, t_probability, t_quantile, verdict
from benchmarks.study.plan import Arm


def test_windows_by_hand() -> None:
    assert [window_of(steps) for steps in (1, 9, 20, 39, 50, 400)] == [1, 1, 2, 3, 5, 5]
    values = np.arange(1.0, 21.0)
    assert first_and_last(values) == (1.5, 19.5)
    values[-1] = np.nan  # the last that exist
    assert first_and_last(values) == (1.5, 18.5)
    assert all(map(math.isnan, first_and_last(np.full(3, np.nan))))


def test_drawdown_by_hand() -> None:
    assert drawdown(np.array([0.1, 0.5, 0.3, 0.6, 0.2, 0.4])) == pytest.approx(0.4)  # from 0.6 to 0.2
    assert drawdown(np.array([0.1, 0.2, 0.2, 0.9])) == 0.0
    assert drawdown(np.array([0.9, 0.1])) == pytest.approx(0.8)
    assert math.isnan(drawdown(np.full(4, np.nan)))
    smooth = np.repeat([0.5, 0.7], 10)
    smooth[15] = 0.1  # one step of 20: in a mean of two steps it counts by half
    assert drawdown(smooth) == pytest.approx(0.3)


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
    return RunRecord(Path("run"), [], updates, [], {})


def test_what_comes_back_in_every_step_is_no_spike() -> None:
    """The first pass over each batch has large norms, the others small ones: a saw, all of 30 steps long."""
    saw = [9.0, 1.0, 0.5, 0.4] * 30
    assert spike_rate(norms(saw, 4)) == 0.0
    saw[81] = 3.5  # the second place of the 21st step; the first place has more, always
    assert spike_rate(norms(saw, 4)) == pytest.approx(100 / 120)
    assert math.isnan(spike_rate(norms([float("nan")] * 8, 4)))


def test_blocks_by_hand() -> None:
    assert in_blocks(np.array([1.0, 3.0, np.nan, 5.0]), 2).tolist() == [2.0, 5.0]
    assert in_blocks(np.arange(3.0), 2).tolist() == [0.0, 1.0, 2.0]


@pytest.fixture
def arm(tmp_path: Path) -> Arm:
    """Four steps of two updates: the reward rises, the entropy halves."""
    steps = [
        {
            "step": step,
            "reward/mean": 0.2 * step,
            "policy/entropy": 1.0 / step,
            "bapo/clip_fraction_high": 0.01,
            "bapo/clip_fraction_low": 0.02,
            "contribution/gradient_absolute_uniform": 0.1 * step,
            "staleness/mean": 3.0,
        }
        for step in range(1, 5)
    ]
    grad_norms = (1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0)
    updates = [
        {
            "step": 1 + place // 2,
            "epoch": place % 2,
            "policy/entropy": 0.4 if place % 2 else 1.6 - 0.3 * (place // 2),
            "policy/grad_norm": norm,
            "bapo/rounds": 3 if place == 2 else 0,
            "bapo/clip_low": 0.9 if place == 2 else 0.6,
            "bapo/clip_high": 1.6 if place == 2 else 1.2,
        }
        for place, norm in enumerate(grad_norms)
    ]
    evaluations = [{"step": 0, "eval/mean": 0.25}, {"step": 4, "eval/mean": 0.75}]
    for name, rows in (("metrics", steps), ("updates", updates), ("evaluations", evaluations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Arm("grpo", "stale_7", 2, 4, tmp_path, ())


def test_an_arm_by_hand(arm: Arm) -> None:
    record = read_arm(arm, 4)
    assert (record.method, record.setting, record.seed) == ("grpo", "stale_7", 2)
    assert record.figures == pytest.approx(
        {
            "final_reward": 0.8,
            "mean_reward": 0.5,
            "drawdown": 0.0,
            "collapsed": 0.0,
            "first_entropy": 1.6,
            "final_entropy": 0.25,
            "entropy_kept": 0.15625,
            "entropy_collapsed": 0.0,
            "spikes": 0.0,  # four steps are too few to know what is usual
            "clipped": 0.03,
            "contribution": 0.25,
            "moved": 0.125,
            "clip_low": 0.6375,
            "clip_high": 1.25,
            "staleness": 3.0,
            "held_out": 0.75,
        }
    )
    assert record.curves["held_out"].step.tolist() == [0.0, 1.0]
    assert record.curves["reward"].step.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_an_entropy_collapse_is_measured_from_the_first_pass(arm: Arm) -> None:
    """The last step's 0.25 nats lie above a tenth of the first 1.6, and below one of 2.6."""
    run = read_run(arm.run_dir)
    assert figures_of(run, 4)["entropy_collapsed"] == 0.0
    updates = [row | {"policy/entropy": 2.6} if not row["epoch"] else row for row in run.updates]
    assert figures_of(replace(run, updates=updates), 4)["entropy_collapsed"] == 1.0


def test_small_steps_are_put_together(arm: Arm) -> None:
    run = read_run(arm.run_dir)
    assert curves_of(run, 2)["reward"].value == pytest.approx([0.3, 0.7])
    figures = figures_of(run, 2)
    assert figures["final_reward"] == pytest.approx(0.7)
    assert figures["first_entropy"] == pytest.approx((1.6 + 1.3) / 2)  # of the first two batches


def test_what_was_not_measured_is_not_a_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    figures = read_arm(Arm("grpo", "fresh", 0, 1, tmp_path, ()), 1).figures
    assert figures["final_reward"] == 0.5
    for name in ("held_out", "spikes", "entropy_kept", "clipped", "contribution"):
        assert math.isnan(figures[name]), name


# Tables of Student's t, 97.5 % and 95 %.
@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        *((0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 9, 2.262)),
        *((0.95, 5, 2.015), (0.975, 30, 2.042), (0.5, 3, 0.0)),
    ],
)
def test_quantiles_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("freedom", range(1, 9))
def test_the_distribution_is_the_integral_of_its_density(freedom: int) -> None:
    values = np.linspace(0, 1.7, 20001)
    factor = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    density = factor * (1 + values**2 / freedom) ** (-(freedom + 1) / 2)
    assert t_probability(1.7, freedom) == pytest.approx(0.5 + np.trapezoid(density, values), abs=1e-8)
    assert t_probability(-1.7, freedom) == pytest.approx(1 - t_probability(1.7, freedom))


@pytest.mark.parametrize(("probability", "freedom"), [(0.4, 3), (1.0, 3), (0.9, 0)])
def test_no_quantile(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(probability, freedom)


def test_an_effect_by_hand() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, s = 0.1, half width 4.303 0.1 / sqrt(3) = 0.2484."""
    effect = paired_effect([0.1, 0.2, 0.3])
    assert effect is not None
    assert (effect.mean, effect.pairs) == (pytest.approx(0.2), 3)
    assert (effect.low, effect.high) == (pytest.approx(-0.0484, abs=1e-4), pytest.approx(0.4484, abs=1e-4))
    assert paired_effect([]) is None
    alone = paired_effect([0.3])
    assert alone is not None
    assert (alone.low, alone.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("differences", "sign", "expected"),
    [
        ([0.20, 0.21, 0.22], 1, "seen"),
        ([0.20, 0.21, 0.22], -1, "opposite"),
        ([-0.20, -0.21, -0.22], -1, "seen"),
        ([0.01, 0.011, 0.012], 1, "not seen"),  # there, and too small to matter
        ([-0.01, -0.011, -0.012], 1, "not seen"),
        ([0.001, -0.001, 0.0], 1, "not seen"),
        ([0.3, -0.1, 0.2], 1, "not distinguishable"),
        ([0.3], 1, "not distinguishable"),
        ([0.2, 0.2, 0.2], 1, "seen"),
        ([0.20, 0.21], 1, "not distinguishable"),  # two may be alike by luck
        ([-0.12, 0.0, -0.02], 1, "not distinguishable"),
        ([-0.06, -0.03, -0.05], 1, "opposite"),
        ([-0.06, -0.01, -0.03], 1, "not seen"),  # harm may be, a benefit that matters not
        ([0.0, 0.0, 0.0], 1, "not seen"),
        ([], 1, "not tried"),
    ],
)
def test_verdicts_by_hand(differences: list[float], sign: int, expected: str) -> None:
    assert verdict(paired_effect(differences), sign, smallest=0.05) == expected
