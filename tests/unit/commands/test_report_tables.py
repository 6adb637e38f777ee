"""The report's tables and the series that it computes of a run's metrics and events, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.algo.bins import RATIO_BINS
from bapo_megatron.commands.report.data import MetricTable, RunRecord, read_metrics, read_run
from bapo_megatron.commands.report.page import own_metrics
from bapo_megatron.commands.report.series import (
    NO_VALUE,
    RATIO_CENTRES,
    Mark,
    event_marks,
    final_results,
    number,
    prediction,
    ratio_profile,
    staleness_cells,
)
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
    assert table.known("b").tolist() == [3]
    assert table.rows() == [{"step": 1, "a": 0.5}, {"step": 2, "b": 3}, {"step": 3, "a": 0.25, "c": 7}]
    assert table.last == ROWS[-1]
    assert isinstance(table.last["c"], int)  # written as 7, not as 7.000
    assert np.isnan(table.column("absent")).all()
    assert not read_metrics(Path("absent"))
    results = final_results(record_of([]))
    assert results["final reward"] is results["largest gradient norm"] is None
    values = [3, 12345, 0.0012345, 0.5, 123.45, 12345.6, None]
    assert [number(value) for value in values] == ["3", "12,345", "0.00123", "0.500", "123.5", "12,346", "–"]  # noqa: RUF001


@pytest.mark.parametrize("line", ["[1]", '{"step": 2'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        read_metrics(write(tmp_path / "log", '{"step": 1}', line))


def test_a_comparison_has_the_metrics_of_custom_losses() -> None:
    runs = [read_run(FIXTURES / name) for name in ("bapo", "papo")]
    assert own_metrics(runs) == [], "all others have panels"
    runs[0].steps.last["spo/factor"] = 0.5
    # Of a mixture of experts, of all that was sampled, of an environment: they have panels.
    ours = ("experts/router_entropy", "sampled/reward/mean", "environment/turns_mean")
    runs[0].steps.last.update(dict.fromkeys(ours, 1.5))
    assert own_metrics(runs) == [("spo/factor", ["0.500", NO_VALUE])]


def record_of(updates: list[dict[str, Any]], events: list[dict[str, Any]] | None = None) -> RunRecord:
    steps = [{"step": step} for step in sorted({row["step"] for row in updates})] or [{"step": 1}]
    return RunRecord(Path("run"), MetricTable(steps), MetricTable(updates), events or [], {})


def update(step: int, epoch: int, entropy: float, effect: float, **rest: Any) -> dict[str, Any]:
    row = {"step": step, "epoch": epoch, "policy/lr": 2.0, "policy/entropy": entropy, **rest}
    return {**row, "entropy_rule/effect": effect, "entropy_rule/covariance": -3 * effect}


def test_a_profile_weighs_updates_by_the_tokens_of_the_bin() -> None:
    """Bin 0.98-1.02: 0.5 x 100 tokens at 0.8 and 0.1 x 300 at 0.4 give (40 + 12) / 80 = 0.65."""
    name = "ratio/0.98-1.02"
    rows = [
        {"step": 1, "policy/tokens": 100, f"{name}/tokens": 0.5, f"{name}/probability": 0.8},
        {"step": 1, "policy/tokens": 300, f"{name}/tokens": 0.1, f"{name}/probability": 0.4},
        {"step": 2, "policy/tokens": 900, f"{name}/tokens": 0.0, f"{name}/probability": None},
    ]
    profile = ratio_profile(record_of(rows), "probability")
    place = RATIO_BINS.index("0.98-1.02")
    assert profile.value[place] == pytest.approx(0.65)
    assert np.isnan(np.delete(profile.value, place)).all()
    assert RATIO_CENTRES[place] == pytest.approx((0.98 * 1.02) ** 0.5)


ONE = {"staleness/1/tokens": 0.25, "staleness/1/covariance": -0.4}
NONE = {"staleness/1/tokens": 0.0, "staleness/1/covariance": None}


PASSES = [
    *(update(1, 0, 2.0, 0.1, **{"policy/tokens": 1}), update(1, 0, 1.0, 0.3, **{"policy/tokens": 3})),
    *(update(1, 1, 1.0, 9.0), update(2, 0, 5.0, -0.5), update(2, 1, 6.0, 9.0)),
]
ONCE = [update(1, 0, 1.0, 0.1), update(2, 0, 1.2, 0.4), update(3, 0, 2.0, -0.2), update(4, 0, 1.6, 0.0)]
OF_ONE = [update(1, 0, 1.0, 0.1, **ONE), update(2, 0, 1.5, 0.1, **NONE), update(3, 0, 1.0, 0.1)]
EFFECT = {"reading": "effect"}


@pytest.mark.parametrize(
    ("rows", "asked", "predicted", "measured", "correlation"),
    [
        # Step 1: entropy (1 x 2.0 + 3 x 1.0) / 4 = 1.25, then 1.0. Predicted 2 (0.1 + 0.3) = 0.8. No pair
        # crosses steps, and two pairs correlate always.
        (PASSES, EFFECT, [0.8, -1.0], [-0.25, 1.0], None),
        (PASSES, {}, [2.4, -3.0], [-0.25, 1.0], None),
        # Without reuse each update is compared with the next.
        (ONCE, EFFECT, [0.2, 0.8, -0.4], [0.2, 0.8, -0.4], pytest.approx(1.0)),
        # Share 0.25 of covariance -0.4 at rate 2: 0.2; an update without such tokens adds nothing.
        (OF_ONE, {"bucket": "1"}, [0.2, 0.0], [0.5, -0.5], None),
    ],
)
def test_the_change_of_entropy_by_hand(
    rows: list[dict[str, Any]], asked: dict[str, str], predicted: Any, measured: Any, correlation: Any
) -> None:
    found = prediction(record_of(rows), **asked)
    assert found.predicted == pytest.approx(predicted)
    assert found.measured == pytest.approx(measured)
    assert found.correlation == correlation


def test_the_staleness_table_has_the_buckets_with_tokens() -> None:
    rows = [
        {"0/tokens": 1.0, "0/clipped": 0.2, "0/entropy": 0.5, "16+/tokens": 0.0},
        {"0/tokens": 0.0, "16+/tokens": 1.0, "16+/clipped": 0.4},
    ]
    rows = [{"step": 1, **{f"staleness/{name}": value for name, value in row.items()}} for row in rows]
    none = [NO_VALUE, NO_VALUE]
    table = [("0", ["50%", "20%", "0.500", *none]), ("16+", ["50%", "40%", NO_VALUE, *none])]
    assert staleness_cells(record_of(rows)) == table


def event(seconds: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:00:{seconds:02d}.000+00:00", "kind": kind, **fields}


def test_a_loss_lies_between_the_steps_around_it() -> None:
    """Saved after step 4 at second 10, after step 8 at second 20: second 15 is step 6. Resumed at step 9."""
    events = [
        event(0, "start", step=1),
        event(10, "saving", step=4),
        event(15, "engine_lost", engine="http://a"),
        event(20, "saving", step=8),
        event(40, "resume", step=9),
        event(50, "server_ended", server="http://a"),
    ]
    assert event_marks(record_of([], events)) == [Mark(8.5, False), Mark(6.0, True), Mark(8.0, True)]


def test_a_run_with_a_damaged_event_is_reported_without_it(tmp_path: Path) -> None:
    """A month of training has one such line where two nodes wrote at the same moment."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (tmp_path / "events.jsonl").write_text('{"kind": "start"}\n": 3}\n{"kind": "resume", "step": 2}\n')
    assert read_run(tmp_path).resumed_at == [2]
