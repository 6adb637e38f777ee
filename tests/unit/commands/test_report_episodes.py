"""The report's table of episodes, by hand."""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.commands.report.data import MetricTable, RunRecord
from bapo_megatron.commands.report.episodes import episode_cells
from bapo_megatron.commands.report.page import _metric_rows
from bapo_megatron.commands.report.text import source_cells


def run_of(*steps: dict[str, float | None]) -> RunRecord:
    return RunRecord(Path("run"), MetricTable(steps), MetricTable([]), [], {})


def test_a_run_without_an_environment_has_no_table() -> None:
    assert episode_cells(run_of({"step": 1, "reward/mean": 0.5}), 1) == []


def test_the_table_by_hand() -> None:
    """The means of the first two steps and of the last two; shares in percent; turns in their order."""
    turns = [1.0, 2.0, 4.0]
    steps = [
        {
            "environment/turns_mean": turn,
            "environment/given_share": turn / 8,
            "environment/reward_turn_10": -turn,
            "environment/reward_turn_2": None if turn == 2 else turn,
            "episode/calls <b>": 3.0,
        }
        for turn in turns
    ]
    assert episode_cells(run_of(*steps), 2) == [
        ("turns of a response, mean", ["1.500", "3.000"]),
        ("given tokens", ["18.8%", "37.5%"]),
        ("reward of answer 2", ["2.500", "2.500"]),
        ("reward of answer 10", ["-1.500", "-3.000"]),
        ("calls <b>", ["3.000", "3.000"]),
    ]


def test_a_metric_that_stops_before_the_run_says_where() -> None:
    """A name that is not there, and null: both are no value. One that comes back at the end needs no word."""
    values: list[dict[str, float | None]] = [
        {"episode/found": 1.0, "episode/back": 4.0},
        {"episode/found": 2.0},
        {"episode/found": 3.0, "episode/never": None},
        {"episode/found": None, "episode/back": 6.0},
    ]
    run = run_of(*({"step": n, "environment/turns_mean": 1.0, **one} for n, one in enumerate(values, 11)))
    assert episode_cells(run, 2)[1:] == [
        ("found", ["1.500", "2.500 (to step 13)"]),
        ("back", ["5.000", "5.000"]),
    ]
    assert [row for row in _metric_rows(run, 1) if row.name.startswith("episode/")] == [
        ("episode/back", ["4.000", "6.000", "6.000"]),
        ("episode/found", ["1.000", "3.000 (to step 13)", "–"]),  # noqa: RUF001
        ("episode/never", ["–", "–", "–"]),  # noqa: RUF001
    ]


def test_the_reward_of_a_source_that_is_not_drawn_any_more() -> None:
    steps: list[dict[str, float | None]] = [{"step": float(n)} for n in (1, 2)]
    steps[0] |= {"source/sums/rollout/groups": 3.0, "source/sums/reward/mean": 0.25}
    [(name, cells)] = source_cells(run_of(*steps), 1)
    assert (name, cells[:3]) == ("sums", ["0", "3", "0.250 → 0.250 (to step 1)"])
