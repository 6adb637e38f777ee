"""A report's header in words (method, bounds, staleness), and what its plots leave out."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bapo_megatron.algo.bins import RATIO_BINS
from bapo_megatron.algo.bounds import BoundsConfig, balanced, clip_higher, fixed, grpo, paper
from bapo_megatron.commands.report import lines
from bapo_megatron.commands.report.data import MetricTable, RunRecord, Series
from bapo_megatron.commands.report.header import comparison_readings, facts, readings
from bapo_megatron.commands.report.lines import (
    Line,
    draw_distribution,
    draw_line,
    line_of,
)
from bapo_megatron.commands.report.panels import (
    DISTRIBUTIONS,
    EXPERT_PANELS,
    Curve,
    Panel,
    episode_panels,
    expert_panels,
)
from bapo_megatron.commands.report.series import RATIO_CENTRES
from bapo_megatron.trainer.checks import EXPERT_NAMES


def settings_of(bounds: BoundsConfig) -> dict[str, Any]:
    return {f"algorithm.bounds.{field.name}": getattr(bounds, field.name) for field in fields(bounds)}


def run_of(bounds: BoundsConfig | None = None, rounds: tuple[int, ...] = (), **rest: Any) -> RunRecord:
    """A run of two steps; a search that moved nothing reached its target, and the others did not."""
    config = {**(settings_of(bounds) if bounds else {}), **rest.pop("config", {})}
    steps = [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.75}]
    updates = [{"step": 1, "bapo/rounds": count, "bapo/reached": float(count == 0)} for count in rounds]
    return RunRecord(Path("run"), MetricTable(steps), MetricTable(updates), [], config, **rest)


def fact(name: str, run: RunRecord) -> str:
    return dict(facts(run))[name]


SEARCHED = "BAPO: clipping bounds searched for each"
OF_UPDATES = f"{SEARCHED} update"
OF_PARTS = f"{SEARCHED} part of an update"
AXES = "gradient, absolute, uniform, high_first"
SHARE_OF_GRADIENT = "of the gradient from positive tokens"
AT_0_4 = f"0.4 {SHARE_OF_GRADIENT}"
AIMLESS = "none: fixed bounds aim at nothing"


@pytest.mark.parametrize(
    ("bounds", "algorithm", "preset", "target"),
    [
        (balanced(), OF_UPDATES, f"balanced ({AXES}, update)", AT_0_4),
        (paper(), OF_PARTS, f"paper ({AXES}, micro_batch of about 16384 tokens)", AT_0_4),
        (BoundsConfig(low_end=0.8), OF_UPDATES, f"of no preset ({AXES}, update)", AT_0_4),
        (clip_higher(), "clip-higher (DAPO): clipping bounds fixed at 0.8 and 1.28", "clip_higher", AIMLESS),
        (fixed(0.9, 1.2), "PPO: clipping bounds fixed at 0.9 and 1.2", "none", AIMLESS),
        (None, "not recorded", "not recorded", "not recorded"),
    ],
)
def test_method(bounds: BoundsConfig | None, algorithm: str, preset: str, target: str) -> None:
    run = run_of(bounds)
    assert [fact(name, run) for name in ("algorithm", "preset", "target")] == [algorithm, preset, target]


def test_target_says_how_the_searches_ended() -> None:
    """Of four updates two moved a bound, and these two missed the target."""
    said = fact("target", run_of(balanced(), rounds=(0, 3, 51, 0)))
    assert said.endswith("; reached in 50% of the updates, a bound moved in 50%")
    # Of many searches: one fresh update and four stale ones; in three a search moved.
    names = ("bapo/bounds_moved", "bapo/rounds", "bapo/reached")
    updates = ((None, 9, 0.75), (1.0, 9, 0.75), (1.0, 2.5, 0.75), (1.0, 3, 1), (0.0, 0, 1))
    rows = [dict(zip(names, values, strict=True)) for values in updates]
    run = replace(run_of(paper()), updates=MetricTable(rows))
    reached = "; reached by searches over 85% of the tokens, a bound moved in 75% of the stale updates"
    assert fact("target", run).endswith(reached)
    other = run_of(balanced(), config={"algorithm.loss": "cispo", "algorithm.polarity.enabled": True})
    assert [fact(name, other) for name in ("algorithm", "target")] == ["loss cispo, with PAPO", "none"]


def test_staleness_by_hand() -> None:
    config = {"algorithm.reuse_epochs": 2, "algorithm.updates_per_epoch": 4, "rollout.max_staleness": 1}
    ages = [{"staleness/mean": 3.0, "staleness/max": 7.0}, {"staleness/mean": 4.0, "staleness/max": 11.0}]
    steps = [row | age for row, age in zip(run_of().steps.rows(), ages, strict=True)]
    run = replace(run_of(config=config), steps=MetricTable(steps))
    assert fact("staleness", run) == (
        "8 updates of a batch (passes: 2, of 4 each); sampled at most 1 step(s) before; "
        "a token is 3.5 updates old in the mean, 11 at most"
    )
    assert fact("staleness", run_of()) == "not recorded"


def test_held_out_by_hand() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval/mean": 0.29},
        {"step": 10, "eval/mean": None},
        {"step": 20, "eval/mean": 0.845, "eval/sums/avg@1_low": 0.795, "eval/sums/avg@1_high": 0.89},
    ]
    two_suites = {"eval/b/avg@1_low": 0.4, "eval/b/avg@1_high": 0.6}  # have no common interval
    for evaluations, held_out in (
        (rows, "29% → 84.5% (95% interval 79.5% to 89%), steps 0 and 20"),
        (rows[2:], "84.5% at step 20"),
        ([rows[0], rows[2] | two_suites], "29% → 84.5%, steps 0 and 20"),
        ([], "not evaluated"),
    ):
        assert fact("held-out", run_of(evaluations=MetricTable(evaluations))) == held_out


def test_a_recipes_note_comes_first() -> None:
    noted = run_of(grpo(), config={"logging.note": "A toy.", "name": "a"})
    other = run_of(grpo(), config={"logging.note": "No toy.", "name": "b"})
    assert readings(noted)[0] == "A toy."
    assert comparison_readings([noted, other])[:2] == ["a: A toy.", "b: No toy."]
    assert comparison_readings([noted, noted])[0] == "A toy."
    assert len(comparison_readings([run_of(), run_of()])) == 1


VALUE = "kind/clipped"
PANEL = Panel("file", "title", "label", (Curve(VALUE),), "caption", "paper")


def plotted_run(*updates: tuple[int, float | None]) -> RunRecord:
    """Updates given as (step, value); the mean of each step is 0.5."""
    rows = [{"step": step, VALUE: value} for step, value in updates]
    steps = [{"step": step, VALUE: 0.5} for step in sorted({step for step, _ in updates})]
    return RunRecord(Path("run"), MetricTable(steps), MetricTable(rows), [], {})


def known(series: Series) -> dict[float, float]:
    return {x: y for x, y in zip(series.step.tolist(), series.value.tolist(), strict=True) if np.isfinite(y)}


def test_a_curve_has_single_updates_and_the_means_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates lie evenly before their step. Many of them, and those without values: the means of steps."""
    run = plotted_run((1, 0.1), (1, 0.3), (2, 1.0), (2, None))
    line = line_of(run, VALUE)
    assert known(line.thin) == {0.5: 0.1, 1: 0.3, 1.5: 1.0}
    assert known(line.thick) == {1: 0.5, 2: 0.5}
    assert known(line_of(plotted_run((1, None), (2, None)), VALUE).thin) == {1: 0.5, 2: 0.5}
    monkeypatch.setattr(lines, "MOST_UPDATES", 3)
    assert known(line_of(run, VALUE).thin) == {1: 0.5, 2: 0.5}


def test_one_outlier_does_not_flatten_a_curve() -> None:
    norms = line_of(plotted_run(*((step, 50.0 if step == 7 else 1.0) for step in range(200))), VALUE)
    assert norms.shown(PANEL).max() < 50.0
    assert norms.shown(replace(PANEL, y_scale="spikes")).max() == 50.0


def test_a_value_between_gaps_is_seen() -> None:
    """Such as the entropy of the only step of three that made an update: a line of one point is none."""
    axes = Figure().subplots()
    values = Series(np.arange(10.0), np.where(np.isin(np.arange(10), (0, 2, 3, 5)), 0.5, np.nan))
    draw_line(axes, Line(values, values), "#000000", "-")
    _, thick = axes.lines
    assert thick.get_marker() == "o"
    assert np.flatnonzero(thick.get_markevery()).tolist() == [0, 5]


def profile_run(tokens: float | None = 10_000) -> RunRecord:
    """Half of the tokens in the bin of 1, 1 % in each of two others, and 20 tokens in the last."""
    shares = {"0.98-1.02": 0.5, "0.9-0.98": 0.01, "1.02-1.1": 0.01, "from_3.0": 0.002}
    row: dict[str, Any] = {"step": 1, "policy/tokens": tokens}
    for name in RATIO_BINS:
        row |= {f"ratio/{name}/tokens": shares.get(name, 0.0), f"ratio/{name}/probability": 0.5}
    return RunRecord(Path("run"), MetricTable([{"step": 1}]), MetricTable([row]), [], {})


def test_bins_of_few_tokens_are_left_out() -> None:
    ones = RATIO_BINS.index("0.98-1.02")
    for tokens, drawn in ((10_000, [ones - 1, ones, ones + 1]), (None, [ones - 1, ones, ones + 1, -1])):
        axes = Figure().subplots()
        assert draw_distribution(axes, DISTRIBUTIONS[0], [(profile_run(tokens), "#000000")])
        assert axes.lines[0].get_xdata().tolist() == pytest.approx(RATIO_CENTRES[drawn].tolist())
    assert [label.get_text() for label in axes.get_xticklabels()] == ["<0.5", "0.7", "1", "1.4", "2", "≥3"]


def test_panels_of_experts_are_of_runs_with_experts() -> None:
    """Each draws metrics that an update of such a model has; beside a dense run, too."""
    rows = [{"step": 1, **dict.fromkeys(EXPERT_NAMES, 1.0)}]
    dense, sparse = plotted_run(), RunRecord(Path("run"), MetricTable(rows), MetricTable([]), [], {})
    assert expert_panels([dense]) == ()
    assert expert_panels([dense, sparse]) == EXPERT_PANELS
    assert {curve.metric for panel in EXPERT_PANELS for curve in panel.curves} == set(EXPERT_NAMES)


def test_rewards_by_answer_are_in_the_order_of_the_answers() -> None:
    turns = [f"environment/reward_turn_{turn}" for turn in ("10", "x", "2")]
    rows = [{"step": 1, **dict.fromkeys(["environment/turns_mean", *turns], 1.0)}]
    run = RunRecord(Path("run"), MetricTable(rows), MetricTable([]), [], {})
    last = episode_panels([run])[-1]
    assert [curve.metric for curve in last.curves] == [turns[2], turns[0]]
    assert episode_panels([plotted_run()]) == []
