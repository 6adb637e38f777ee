"""Tables of metrics: a log of flat JSON rows (metrics.jsonl, updates.jsonl) as float64 columns.

A value takes 8 bytes, and the log is read line by line: 40,000 updates of 170 metrics take 55 MB, where their
rows as dicts take 1 GB. Used by ``commands/train.py`` and in this folder.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.jsonl_log import Row, parse_line, whole_lines

_PLAIN = {int, float, bool, type(None)}
"""Types of a metric's value in JSON."""


@dataclass(frozen=True)
class _Rows:
    """Rows with the same names in the same order. Made by ``MetricTable``."""

    places: dict[str, int]
    """Place of each name within a row."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Numbers of these rows in the table, from 0."""
    values: array[float] = field(default_factory=lambda: array("d"))
    """Values of these rows, row after row; NaN for null."""

    def column(self, name: str) -> np.ndarray:
        """Values of one name, a view."""
        return np.frombuffer(self.values).reshape(-1, len(self.places))[:, self.places[name]]


class MetricTable:
    """Metrics of a log as columns, NaN where a row has null or lacks the name. Made by ``read_metrics``.

    Rows that have the same names are stored together: a name of few rows takes no column of all rows, and
    costs nothing until it is asked for. False in a condition if it has no rows.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._kinds: dict[tuple[str, ...], _Rows] = {}
        self._length = 0
        self.last: Row = {}
        """Last row as it was logged; empty without rows."""
        for row in rows:
            names = tuple(row)
            if (kind := self._kinds.get(names)) is None:
                kind = self._kinds[names] = _Rows({name: place for place, name in enumerate(names)})
            kind.numbers.append(self._length)
            kind.values.frombytes(np.array(list(row.values()), dtype=float).tobytes())  # None becomes NaN
            self._length += 1
            self.last = row

    def __len__(self) -> int:
        """Number of rows."""
        return self._length

    @property
    def names(self) -> list[str]:
        """Names of all rows, in the order in which they first appear."""
        return list(dict.fromkeys(name for names in self._kinds for name in names))

    def column(self, name: str) -> np.ndarray:
        """Values of a metric, one a row."""
        values = np.full(self._length, np.nan)
        for kind in self._kinds.values():
            if name in kind.places:
                values[np.frombuffer(kind.numbers, np.int64)] = kind.column(name)
        return values

    def logged(self, name: str) -> np.ndarray:
        """Whether each row has the name, be its value null."""
        found = np.zeros(self._length, dtype=bool)
        for kind in self._kinds.values():
            found[np.frombuffer(kind.numbers, np.int64)] = name in kind.places
        return found

    def known(self, name: str) -> np.ndarray:
        """Values of a metric in the rows that have one."""
        values = self.column(name)
        known: np.ndarray = values[~np.isnan(values)]
        return known

    def rows(self) -> list[Row]:
        """All rows as dicts, with None for null: for short logs and small parts of a run."""
        rows: list[Row] = [{} for _ in range(self._length)]
        for kind in self._kinds.values():
            values = np.frombuffer(kind.values).reshape(-1, len(kind.places)).tolist()
            for number, found in zip(kind.numbers, values, strict=True):
                rows[number] = {
                    name: None if value != value else value
                    for name, value in zip(kind.places, found, strict=True)
                }
        return rows


def read_metrics(path: Path) -> MetricTable:
    """The table of a log of metrics, empty if there is no file.

    ConfigError for a line that is no JSON, a row without a step, and a metric that is no number.
    """
    return MetricTable(_checked_rows(path) if path.exists() else ())


def _checked_rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(whole_lines(path), 1):
        try:
            row = orjson.loads(line)  # five times as fast as the reader that explains what is wrong
        except orjson.JSONDecodeError:
            row = None
        if not _is_plain(row):
            row = parse_line(line, path, number)
            _check(row, path, number)
        yield row


def _is_plain(row: Any) -> bool:
    """Whether a row certainly passes ``_check``; ``orjson`` refuses numbers beyond 64 bits."""
    if type(row) is not dict or not _PLAIN.issuperset(map(type, row.values())):
        return False
    step = row.get("step")
    return step is not None and abs(step) < 2**53 and step == int(step)


def _check(row: Row, path: Path, number: int) -> None:
    if not _is_number(row.get("step")) or row["step"] != int(row["step"]):
        raise ConfigError(f"{path}, line {number} has no whole number as its step; mend or delete the line")
    for name, value in row.items():
        if value is not None and not _is_number(value):
            raise ConfigError(
                f"{path}, line {number}: {name[:80]!a} is {str(value)[:80]!a}, no number; mend or delete "
                "the line"
            )


def _is_number(value: Any) -> bool:
    """Whether a value fits a double."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
