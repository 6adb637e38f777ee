"""The report's tables: metrics as columns in eight bytes a value, episodes, sources, metrics of one's own."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.commands.report.data import MetricTable, RunRecord, read_metrics, read_run
from bapo_megatron.commands.report.episodes import episode_cells
from bapo_megatron.commands.report.page import _metric_rows, own_metrics
from bapo_megatron.commands.report.text import NO_VALUE, source_cells
from bapo_megatron.errors import ConfigError

FIXTURES = Path(__file__).parents[2] / "fixtures"
ROWS = [{"step": 1, "a": 0.5, "b": None}, {"step": 2, "b": 3}, {"a": 0.25, "step": 3, "c": 7}]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_columns_by_hand(tmp_path: Path) -> None:
    table = read_metrics(write(tmp_path / "log", *map(json.dumps, ROWS)))
    assert len(table) == 3
    assert table.names == ["step", "a", "b", "c"]
    assert table.column("step").tolist() == [1, 2, 3]
    assert table.column("a") == pytest.approx([0.5, np.nan, 0.25], nan_ok=True)
    assert table.logged("b").tolist() == [True, True, False]
    assert table.known("b").tolist() == [3]
    assert table.rows() == ROWS
    assert table.last == ROWS[-1]
    assert isinstance(table.last["c"], int)  # written as 7, not as 7.000
    assert np.isnan(table.column("absent")).all()


def test_a_log_without_rows() -> None:
    assert not MetricTable([])
    assert not read_metrics(Path("absent"))
    assert (MetricTable([]).names, MetricTable([]).rows(), MetricTable([]).last) == ([], [], {})
    assert len(MetricTable([]).column("step")) == 0


def test_a_value_takes_eight_bytes(tmp_path: Path) -> None:
    """Rows as dicts take above 60, and the lines 19 more."""
    names, count = [f"metric/{number}" for number in range(200)], 1000
    lines = (json.dumps({"step": n} | dict.fromkeys(names, n + 0.123456789)) for n in range(count))
    path = write(tmp_path / "log", *lines)
    tracemalloc.start()
    try:
        table = read_metrics(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * count * len(names)
    assert table.column("metric/7")[-1] == 999.123456789


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2 is not JSON .no JSON object.; mend or delete the line"),
        ('{"step": 2', "line 2 is not JSON"),
        ('{"a": 2}', "line 2 has no whole number as its step"),
        ('{"step": null}', "line 2 has no whole number as its step"),
        ('{"step": 1.5}', "line 2 has no whole number as its step"),
        ('{"step": 2, "a": "0.5"}', "line 2: 'a' is '0.5', no number; mend or delete the line"),
        ('{"step": 2, "a": [1]}', "line 2: 'a' is .*, no number"),
        ('{"step": 2, "a": NaN}', "line 2 is not JSON .NaN is not strict JSON."),
        ('{"step": 2, "a": 1e999}', "line 2 is not JSON .1e999 is beyond a 64-bit number."),
        (f'{{"step": 2, "a": 1{"0" * 400}}}', "line 2: 'a' is '10+', no number"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_metrics(write(tmp_path / "log", '{"step": 1}', line))


@pytest.mark.parametrize("line", ['{"step": 2.0, "a": true}', '{"step": 2, "a": 123456789012345678901234}'])
def test_any_number_is_read(tmp_path: Path, line: str) -> None:
    assert read_metrics(write(tmp_path / "log", line)).known("a").tolist() == [float(json.loads(line)["a"])]


# --- tables of the page ----------------------------------------------------------------------------


def run_of(*steps: dict[str, float | None]) -> RunRecord:
    return RunRecord(Path("run"), MetricTable(steps), MetricTable([]), [], {})


def test_a_run_without_an_environment_has_no_table() -> None:
    assert episode_cells(run_of({"step": 1, "reward/mean": 0.5}), 1) == []


def test_the_table_of_episodes_by_hand() -> None:
    """The means of the first two steps and of the last two; shares in percent; turns in their order."""
    turns = [1.0, 2.0, 4.0]
    steps = [
        {
            "environment/turns_mean": turn,
            "environment/given_share": turn / 8,
            "environment/finish_failed": turn / 10,
            "environment/reward_turn_10": -turn,
            "environment/reward_turn_2": None if turn == 2 else turn,
            "episode/calls <b>": 3.0,
        }
        for turn in turns
    ]
    assert episode_cells(run_of(*steps), 2) == [
        ("turns of a response, mean", ["1.500", "3.000"]),
        ("given tokens", ["18.8%", "37.5%"]),
        ("ended by a failure", ["15%", "30%"]),
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
    assert [row for row in _metric_rows(run, 1) if row[0].startswith("episode/")] == [
        ("episode/back", ["4.000", "6.000", "6.000"]),
        ("episode/found", ["1.000", "3.000 (to step 13)", "–"]),  # noqa: RUF001
        ("episode/never", ["–", "–", "–"]),  # noqa: RUF001
    ]


def test_the_reward_of_a_source_that_is_not_drawn_any_more() -> None:
    steps: list[dict[str, float | None]] = [{"step": float(n)} for n in (1, 2)]
    steps[0] |= {"source/sums/rollout/groups": 3.0, "source/sums/reward/mean": 0.25}
    [(name, cells)] = source_cells(run_of(*steps), 1)
    assert (name, cells[:3]) == ("sums", ["0", "3", "0.250 → 0.250 (to step 1)"])


def test_a_comparison_has_the_metrics_of_custom_losses() -> None:
    runs = [read_run(FIXTURES / name) for name in ("bapo", "papo")]
    assert own_metrics(runs) == [], "all others have panels"
    runs[0].steps.last["spo/factor"] = 0.5
    runs[0].steps.last["experts/router_entropy"] = 1.5  # of a mixture of experts: it has panels
    assert own_metrics(runs) == [("spo/factor", ["0.500", NO_VALUE])]
