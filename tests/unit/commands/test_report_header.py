"""Header of a report: method, target, bounds, staleness and settings in words."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.algo.bounds import BoundsConfig, balanced, clip_higher, fixed, floored, grpo, paper
from bapo_megatron.commands.report.data import MetricTable, RunRecord
from bapo_megatron.commands.report.header import comparison_readings, facts, main_settings, readings


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


@pytest.mark.parametrize(
    ("bounds", "algorithm", "preset", "target"),
    [
        (
            balanced(),
            "BAPO: clipping bounds searched for each update",
            "balanced (gradient, absolute, uniform, high_first, update)",
            "0.4 of the gradient from positive tokens",
        ),
        (
            paper(),
            "BAPO: clipping bounds searched for each part of an update",
            "paper (gradient, absolute, uniform, high_first, micro_batch of about 16384 tokens)",
            "0.4 of the gradient from positive tokens",
        ),
        (
            BoundsConfig(target=0.5, low_start=0.8),
            "BAPO: clipping bounds searched for each update",
            "floored (gradient, absolute, uniform, high_first, update), but for its target",
            "0.5 of the gradient from positive tokens",
        ),
        (
            BoundsConfig(low_end=0.8),
            "BAPO: clipping bounds searched for each update",
            "of no preset (gradient, absolute, uniform, high_first, update)",
            "0.4 of the gradient from positive tokens",
        ),
        (grpo(), "GRPO: clipping bounds fixed at 0.8 and 1.2", "grpo", "none: fixed bounds aim at nothing"),
        (
            clip_higher(),
            "clip-higher (DAPO): clipping bounds fixed at 0.8 and 1.28",
            "clip_higher",
            "none: fixed bounds aim at nothing",
        ),
        (
            fixed(0.9, 1.2),
            "PPO: clipping bounds fixed at 0.9 and 1.2",
            "none",
            "none: fixed bounds aim at nothing",
        ),
        (None, "not recorded", "not recorded", "not recorded"),
    ],
)
def test_method(bounds: BoundsConfig | None, algorithm: str, preset: str, target: str) -> None:
    run = run_of(bounds)
    assert [fact(name, run) for name in ("algorithm", "preset", "target")] == [algorithm, preset, target]


def test_other_losses_and_papo_are_named() -> None:
    run = run_of(balanced(), config={"algorithm.loss": "cispo", "algorithm.polarity.enabled": True})
    assert fact("algorithm", run) == "loss cispo, with PAPO"
    assert fact("target", run) == "none"
    assert floored() != balanced()


def test_target_says_how_the_searches_ended() -> None:
    """Of four updates two moved a bound, and these two missed the target."""
    said = fact("target", run_of(balanced(), rounds=(0, 3, 51, 0)))
    assert said.endswith("; reached in 50% of the updates, a bound moved in 50%")


def test_staleness_by_hand() -> None:
    config = {"algorithm.reuse_epochs": 2, "algorithm.updates_per_epoch": 4, "rollout.max_staleness": 1}
    ages = [{"staleness/mean": 3.0, "staleness/max": 7.0}, {"staleness/mean": 4.0, "staleness/max": 11.0}]
    steps = [row | age for row, age in zip(run_of().steps.rows(), ages, strict=True)]
    run = replace(run_of(config=config), steps=MetricTable(steps))
    assert fact("staleness", run) == (
        "8 updates of a batch (2 passes of 4 updates); sampled up to 1 step before; "
        "a token is 3.5 updates old in the mean, 11 at most"
    )
    assert fact("staleness", run_of()) == "not recorded"


def test_held_out_and_baseline_by_hand() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval/mean": 0.29},
        {"step": 10, "eval/mean": None},
        {"step": 20, "eval/mean": 0.845, "eval/sums/avg@1_low": 0.795, "eval/sums/avg@1_high": 0.89},
    ]
    run = run_of(evaluations=MetricTable(rows))
    assert fact("held-out", run) == "29% → 84.5% (95% interval 79.5% to 89%), steps 0 and 20"
    assert fact("baseline", run) == "the policy before training, reward 0.250, held-out 29%"
    assert fact("held-out", run_of(evaluations=MetricTable(rows[2:]))) == "84.5% at step 20"
    assert (
        fact("baseline", run_of(evaluations=MetricTable(rows[2:])))
        == "the policy before training, reward 0.250"
    )
    assert fact("held-out", run_of()) == "not evaluated"


def test_two_suites_have_no_common_interval() -> None:
    row = {"step": 9, "eval/mean": 0.5} | {f"eval/{suite}/avg@1_low": 0.4 for suite in "ab"}
    rows = [{"step": 0, "eval/mean": 0.1}, row | {f"eval/{suite}/avg@1_high": 0.6 for suite in "ab"}]
    assert fact("held-out", run_of(evaluations=MetricTable(rows))) == "10% → 50%, steps 0 and 9"


def test_bounds_that_stay_at_their_starts_are_noted() -> None:
    [reward, search, method] = readings(run_of(balanced(), rounds=(0,) * 40))
    assert reward == "The reward went from 0.250 to 0.750."
    assert search.startswith(
        "A bound moved in no update: nearly always the target of 0.4 was met at 0.6 and 1.2"
    )
    assert search.endswith("and nothing of the search.")
    assert method.startswith("It does not show that this method is better than another")
    seldom = readings(run_of(balanced(), rounds=(51, *(0,) * 39)))[1]
    assert seldom.startswith("A bound moved in 2.5% of the updates only")


def test_bounds_that_move_are_noted_with_their_end() -> None:
    moved = readings(run_of(balanced(), rounds=(0, 51, 51, 51)))[1]
    assert moved == (
        "In 75% of the updates the search moved a bound off 0.6 and 1.2. In 75% of the updates the search "
        "came to its end, 0.9 and 3, and the positive tokens still held less than the target."
    )
    lagged = readings(run_of(replace(balanced(), scope="lagged"), rounds=(0, 0, 51, 51)))[1]
    assert lagged.endswith("In 50% of the updates the bounds of the one before left less than the target.")


def test_of_many_searches_it_says_what_was_measured() -> None:
    """One fresh update and four stale ones; in three a search moved, over 1/2, 1/4 and 1/4 of the tokens.

    It does not say that the positive tokens as a whole held less than the target.
    """
    names = ("bapo/bounds_moved", "bapo/moved_tokens", "bapo/rounds", "bapo/reached")
    updates = (
        (None, None, 9, 0.75),
        (1.0, 0.5, 9, 0.75),
        (1.0, 0.25, 2.5, 0.75),
        (1.0, 0.25, 3, 1),
        (0.0, 0.0, 0, 1),
    )
    rows = [dict(zip(names, values, strict=True)) for values in updates]
    run = replace(run_of(paper()), updates=MetricTable(rows))
    said = "In 75% of the stale updates at least one search moved a bound off 0.6 and 1.2"
    missed = (
        "Over 15% of the tokens of all updates a search did not reach the target: it came to its end, 0.9 "
        "and 3, or had nothing to weigh."
    )
    assert readings(run)[1] == f"{said}; the searches that did saw 25% of the tokens. {missed}"
    reached = "; reached by searches over 85% of the tokens, a bound moved in 75% of the stale updates"
    assert fact("target", run).endswith(reached)
    old = [{name: value for name, value in row.items() if name != "bapo/moved_tokens"} for row in rows]
    assert readings(replace(run, updates=MetricTable(old)))[1] == f"{said}. {missed}"


def of_updates(*updates: tuple[int, bool]) -> RunRecord:
    """A run whose updates made so many rounds, and reached the target or not."""
    rows = [{"step": 1, "bapo/rounds": rounds, "bapo/reached": float(reached)} for rounds, reached in updates]
    return replace(run_of(balanced()), updates=MetricTable(rows))


NOTHING = (
    "of the updates the search had nothing to weigh: all advantages were 0, as where each response of a "
    "group has the same reward. The bounds stay at 0.6 and 1.2 there."
)


def test_updates_without_an_advantage_neither_meet_the_target_nor_end_a_search() -> None:
    """All sums were 0: no round, and the target is not reached. A first run often has nothing else."""
    nothing = readings(of_updates(*[(0, False)] * 4))
    assert nothing[1] == f"In 100% {NOTHING}"
    assert len(nothing) == 3  # and nothing of the target
    some = readings(of_updates(*[(0, False)] * 14, *[(51, False)] * 2))
    assert some[1] == f"In 87.5% {NOTHING}"
    assert "In 12.5% of the updates the search came to its end, 0.9 and 3" in some[2]
    met = readings(of_updates(*[(0, False)] * 2, *[(0, True)] * 2))
    assert met[1] == f"In 50% {NOTHING}"
    assert met[2].startswith("A bound moved in no update: elsewhere nearly always the target of 0.4 was met")


@pytest.mark.parametrize("bounds", [grpo(), None])
def test_without_a_search_it_is_not_mentioned(bounds: BoundsConfig | None) -> None:
    assert len(readings(run_of(bounds, rounds=(0, 0)))) == 2


def test_a_recipes_note_comes_first() -> None:
    noted = run_of(grpo(), config={"logging.note": "A toy.", "name": "a"})
    other = run_of(grpo(), config={"logging.note": "No toy.", "name": "b"})
    assert readings(noted)[0] == "A toy."
    assert comparison_readings([noted, other])[:2] == ["a: A toy.", "b: No toy."]
    assert comparison_readings([noted, noted])[0] == "A toy."
    assert len(comparison_readings([run_of(), run_of()])) == 1


def test_a_mean_over_sources_sends_to_the_table_by_source() -> None:
    mixed, alone = (
        [text for text in readings(run_of(grpo(), config={"data.sources": sources})) if "By source" in text]
        for sources in ([{"path": "a"}, {"path": "b"}], [{"path": "a"}])
    )
    assert (len(mixed), alone) == (1, [])


def test_settings_in_short() -> None:
    config = {
        "model.hf_path": "models/tiny",
        "rollout.prompts_per_step": 16,
        "rollout.group_size": 8,
        "rollout.max_response_tokens": 64,
        "rollout.temperature": 1.0,
        "optimizer.lr": 2e-05,
        "evaluation.every": 10,
        "evaluation.suites": ["sums"],
        "seed": 0,
    }
    assert main_settings(config) == [
        ("model", "models/tiny"),
        ("batch", "16 prompts of 8 responses, at most 64 tokens, temperature 1"),
        ("evaluation", "every 10 steps, 1 response a problem: sums"),
        ("seed", "0"),
    ]
    assert main_settings({}) == []
