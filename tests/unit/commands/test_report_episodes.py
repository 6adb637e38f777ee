"""The report's table of episodes, by hand."""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.commands.report.data import RunRecord
from bapo_megatron.commands.report.episodes import episode_cells
from bapo_megatron.commands.report.metric_table import MetricTable


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
