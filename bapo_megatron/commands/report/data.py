"""Log reader of a report: the metrics, updates and events of a run directory, and its headline numbers.

The run may still be training. ConfigError for a directory without metrics, and for a damaged log. Used in
this folder.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from bapo_megatron.checkpoint.fork_record import lineage_text
from bapo_megatron.checkpoint.run_directory import read_config
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.jsonl_log import Row, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths

PAGE = "index.html"
"""File of the page in a report's folder."""

_TITLE = re.compile(rb"(?s)<title>.* \xc2\xb7 (training report|comparison)</title>")


class Headline(TypedDict):
    """The headline numbers of a run, as a dict; None for a number that the metrics do not have."""

    reward_first: float | None
    """Mean reward of the first ``window`` steps that have one."""
    reward_last: float | None
    """Mean reward of the last ``window`` steps that have one."""
    window: int
    steps: int
    tokens: float
    """Tokens per second times seconds, summed over the steps."""
    time_s: float
    """Sum of the step times, without start-up and without waiting for a requeue."""


@dataclass(frozen=True)
class Series:
    """A time series: the values of one metric over a run, NaN where the log has none.

    ``step`` is a fraction where the values are those of single updates.
    """

    step: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class RunRecord:
    """The logs of one run directory, read once by ``read_run``, with their series by step and by update."""

    run_dir: Path
    steps: list[Row]
    updates: list[Row]
    events: list[Row]
    config: dict[str, Any]
    """The resolved configuration by dotted names; empty if it was not stored."""
    evaluations: list[Row] = field(default_factory=list)
    """Metrics on held-out problems, at the steps that were evaluated."""
    forked: str | None = None
    """The run and step that it was forked from, as text."""

    @property
    def name(self) -> str:
        """The run's name, or the name of its directory if none was stored."""
        return str(self.config.get("name") or self.run_dir.resolve().name)

    @property
    def resumed_at(self) -> list[int]:
        """The first step of each resume."""
        resumes = (event for event in self.events if event.get("kind") == "resume")
        return [event["step"] for event in resumes if isinstance(event.get("step"), int)]

    @property
    def step_numbers(self) -> np.ndarray:
        """The numbers of the steps that have metrics."""
        return np.array([row["step"] for row in self.steps], dtype=float)

    @property
    def first_step(self) -> int:
        """The first step that can be drawn: 0 if the initial weights were evaluated."""
        return min(int(row["step"]) for row in (*self.steps, *self.evaluations))

    def by_step(self, metric: str) -> Series:
        """The values of a metric by step; those of an ``eval/`` metric at the evaluated steps."""
        if metric.startswith("eval/") and self.evaluations:
            steps = np.array([row["step"] for row in self.evaluations], dtype=float)
            return Series(steps, _values(self.evaluations, metric))
        return Series(self.step_numbers, _values(self.steps, metric))

    def by_update(self, metric: str) -> Series:
        """The values of a metric by update; the updates of step ``s`` lie evenly in (s - 1, s]."""
        steps = np.array([row["step"] for row in self.updates], dtype=float)
        _, first, count = np.unique(steps, return_index=True, return_counts=True)
        place = np.arange(len(steps)) - np.repeat(first, count)
        position = steps - 1 + (place + 1) / np.repeat(count, count)
        return Series(position, _values(self.updates, metric))


def read_run(run_dir: Path) -> RunRecord:
    """Read the logs of a run directory. ConfigError if metrics.jsonl, the only required one, has no step."""
    paths = RunPaths(run_dir)
    path = paths.metrics
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: {run_dir} is not a run directory, or its run never started"
        )
    steps = _metrics(path)
    if not steps:
        raise ConfigError(f"{path} has no steps yet: there is nothing to report")
    return RunRecord(
        run_dir,
        steps,
        _metrics(paths.updates),
        _read_optional(paths.events),
        read_config(run_dir) or {},
        _metrics(paths.evaluations),
        lineage_text(run_dir),
    )


def headline(rows: list[Row]) -> Headline:
    """The headline numbers of the rows of a metrics.jsonl; ``window`` is a tenth of the steps, between 1 and
    5."""
    rewards = known_values(rows, "reward/mean")
    window = min(max(len(rows) // 10, 1), 5)
    seconds = [row.get("time/step_s") or 0.0 for row in rows]
    tokens_per_s = [row.get("time/tokens_per_s") or 0.0 for row in rows]
    return Headline(
        reward_first=mean(rewards[:window]),
        reward_last=mean(rewards[-window:]),
        window=window,
        steps=len(rows),
        tokens=sum(speed * time for speed, time in zip(tokens_per_s, seconds, strict=True)),
        time_s=sum(seconds),
    )


def mean(values: list[float]) -> float | None:
    """The mean of ``values``; None if there are none."""
    return sum(values) / len(values) if values else None


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The centered moving mean over ``window`` (odd) values, missing ones left out."""
    exists = np.isfinite(values)
    box = np.ones(window)
    sums = np.convolve(np.where(exists, values, 0.0), box, mode="same")
    counts = np.convolve(exists.astype(float), box, mode="same")
    means = np.full_like(sums, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def known_values(rows: list[Row], metric: str) -> list[float]:
    """The values of a metric in the rows that have one."""
    return [row[metric] for row in rows if row.get(metric) is not None]


def _values(rows: list[Row], metric: str) -> np.ndarray:
    return np.array([row.get(metric) for row in rows], dtype=float)  # None becomes NaN


def _metrics(path: Path) -> list[Row]:
    """The rows of a log of metrics. ConfigError for a row without a step, and a metric that is no number."""
    rows = _read_optional(path)
    for number, row in enumerate(rows, 1):
        if not _is_number(row.get("step")) or row["step"] != int(row["step"]):
            raise ConfigError(
                f"{path}, line {number} has no whole number as its step; mend or delete the line"
            )
        for name, value in row.items():
            if value is not None and not _is_number(value):
                raise ConfigError(
                    f"{path}, line {number}: {name[:80]!a} is {str(value)[:80]!a}, no number; mend or delete "
                    "the line"
                )
    return rows


def _is_number(value: Any) -> bool:
    """Whether a value fits a double."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def make_report_folder(folder: Path) -> None:
    """Make the folder of a report. ConfigError if it is not writable, or has a page of another program."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(f"the report cannot be written to {folder}: name another folder with --output DIR")
    page = folder / PAGE
    if os.path.lexists(page) and not _is_report(page):
        raise ConfigError(
            f"{page} is no page of bapo report, and is kept: name another folder with --output DIR"
        )


def _is_report(page: Path) -> bool:
    """Whether a file is a page of a report or of a comparison, also of an earlier version."""
    if page.is_symlink() or not page.is_file():
        return False
    with page.open("rb") as file:
        return _TITLE.search(file.read(1 << 16)) is not None


def _read_optional(path: Path) -> list[Row]:
    return read_jsonl(path) if path.exists() else []
