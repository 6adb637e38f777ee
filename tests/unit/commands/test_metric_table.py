"""Table of metrics: what is logged, as columns, in eight bytes a value."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.commands.report.data import MetricTable, read_metrics
from bapo_megatron.errors import ConfigError

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
