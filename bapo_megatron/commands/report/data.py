"""Log reader of a report: the metrics, updates and events of a run directory, and its headline numbers.

The run may still be training. ConfigError for a directory without metrics, and for damaged metrics. Used in
``commands/`` and this folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.algo.settings import out_of_range, wrong_types
from bapo_megatron.checkpoint.fork_record import lineage_text
from bapo_megatron.checkpoint.run_directory import read_config
from bapo_megatron.commands.report.metric_table import MetricTable, read_metrics
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.jsonl_log import Row, read_events
from bapo_megatron.runtime.run_paths import RunPaths

PAGE = "index.html"
"""File of the page in a report's folder."""

_TITLE = re.compile(rb"(?s)<title>.* \xc2\xb7 (training report|comparison)</title>")


_COUNTS = (
    *("algorithm.reuse_epochs", "algorithm.updates_per_epoch", "rollout.max_staleness"),
    *("evaluation.every", "evaluation.samples"),
)
"""Fields of a stored configuration that the page computes with."""
_MOST_CANDIDATES = 1_000_000
"""Most candidates of a bound; the paper's have 37 and 16."""


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

    ``step`` is a fraction where the values are those of single updates. Made by ``RunRecord.by_step`` and
    ``by_update``, and by what derives curves from these.
    """

    step: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class RunRecord:
    """The logs of one run directory, read once by ``read_run``, with their series by step and by update."""

    run_dir: Path
    steps: MetricTable
    updates: MetricTable
    events: list[Row]
    config: dict[str, Any]
    """The resolved configuration by dotted names; empty if it was not stored."""
    evaluations: MetricTable = field(default_factory=lambda: MetricTable([]))
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
        return self.steps.column("step")

    @property
    def first_step(self) -> int:
        """The first step that can be drawn: 0 if the initial weights were evaluated."""
        return int(min(table.column("step").min() for table in (self.steps, self.evaluations) if table))

    def by_step(self, metric: str) -> Series:
        """The values of a metric by step; those of an ``eval/`` metric at the evaluated steps."""
        if metric.startswith("eval/") and self.evaluations:
            return Series(self.evaluations.column("step"), self.evaluations.column(metric))
        return Series(self.step_numbers, self.steps.column(metric))

    def by_update(self, metric: str) -> Series:
        """The values of a metric by update; the updates of step ``s`` lie evenly in (s - 1, s]."""
        steps = self.updates.column("step")
        _, first, count = np.unique(steps, return_index=True, return_counts=True)
        place = np.arange(len(steps)) - np.repeat(first, count)
        position = steps - 1 + (place + 1) / np.repeat(count, count)
        return Series(position, self.updates.column(metric))


def read_run(run_dir: Path) -> RunRecord:
    """Read the logs of a run directory. ConfigError if metrics.jsonl, the only required one, has no step."""
    paths = RunPaths(run_dir)
    path = paths.metrics
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: {run_dir} is not a run directory, or its run never started"
        )
    steps = read_metrics(path)
    if not steps:
        raise ConfigError(f"{path} has no steps yet: there is nothing to report")
    return RunRecord(
        run_dir,
        steps,
        read_metrics(paths.updates),
        read_events(paths.events) if paths.events.exists() else [],
        _config_of(run_dir),
        read_metrics(paths.evaluations),
        lineage_text(run_dir),
    )


def configured_bounds(config: Mapping[str, Any]) -> BoundsConfig | None:
    """The clipping bounds in a stored configuration; None if it has none."""
    named = {field.name: f"algorithm.bounds.{field.name}" for field in fields(BoundsConfig)}
    stored = {name: config[key] for name, key in named.items() if key in config}
    return BoundsConfig(**stored) if {"low_start", "high_start"} <= stored.keys() else None


def _config_of(run_dir: Path) -> dict[str, Any]:
    """The stored configuration; empty if there is none. ConfigError for values that no run can have had: who
    made the folder may have written anything, and a step of 1e-12 has more candidates than any memory."""
    config = read_config(run_dir) or {}
    for problem in _impossible(config):
        raise ConfigError(f"{RunPaths(run_dir).config}: {problem[:200]}: mend the file")
    return config


def _impossible(config: Mapping[str, Any]) -> Iterator[str]:
    """Values that the page computes with and no run can have had; not what newer versions refuse as well."""
    for name in _COUNTS:
        if (value := config.get(name)) is not None and type(value) is not int:
            yield f"{name}={value!r} must be a whole number"
    if not isinstance(path := config.get("model.hf_path", ""), str):
        yield f"model.hf_path={path!r} must be a text"
    if (bounds := configured_bounds(config)) is None:
        return
    yield from (f"algorithm.bounds.{problem}" for problem in (*wrong_types(bounds), *out_of_range(bounds)))
    for name in ("low", "high"):
        start, end, step = (getattr(bounds, f"{name}_{part}") for part in ("start", "end", "step"))
        if end > start and not (end - start) / _MOST_CANDIDATES <= step:
            yield f"algorithm.bounds.{name}_step={step} makes more than {_MOST_CANDIDATES:,} candidates"


def headline(steps: MetricTable) -> Headline:
    """The headline numbers of a metrics.jsonl; ``window`` is a tenth of the steps, between 1 and 5."""
    rewards = steps.known("reward/mean")
    window = min(max(len(steps) // 10, 1), 5)
    seconds, tokens_per_s = (
        np.nan_to_num(steps.column(f"time/{name}")) for name in ("step_s", "tokens_per_s")
    )
    return Headline(
        reward_first=mean(rewards[:window]),
        reward_last=mean(rewards[-window:]),
        window=window,
        steps=len(steps),
        tokens=float(tokens_per_s @ seconds),
        time_s=float(seconds.sum()),
    )


def mean(values: np.ndarray) -> float | None:
    """The mean of ``values``; None if there are none."""
    return float(values.mean()) if len(values) else None


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The centered moving mean over ``window`` (odd) values, missing ones left out."""
    exists = np.isfinite(values)
    box = np.ones(window)
    sums = np.convolve(np.where(exists, values, 0.0), box, mode="same")
    counts = np.convolve(exists.astype(float), box, mode="same")
    means = np.full_like(sums, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


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
