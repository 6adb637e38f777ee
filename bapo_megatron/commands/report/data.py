"""What a report is made of: the logs of a run directory, and the few numbers that are worked out of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from bapo_megatron.checkpoint.run_directory import read_config
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.jsonl_log import Row, read_jsonl
from bapo_megatron.trainer.metrics_log import EVALUATIONS


class Headline(TypedDict):
    """A run in figures. None where the metrics do not say."""

    reward_first: float | None
    """Mean reward of the first ``window`` steps that have one."""
    reward_last: float | None
    """Mean reward of the last ``window`` steps that have one."""
    window: int
    steps: int
    tokens: float
    """Tokens per second times seconds, summed over the steps."""
    time_s: float
    """Sum of the step times: without start-up, and without waiting for a requeue."""


@dataclass(frozen=True)
class Series:
    """One metric over the run. NaN where it has no value."""

    step: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class RunRecord:
    """All that a run directory says of its run."""

    run_dir: Path
    steps: list[Row]
    updates: list[Row]
    events: list[Row]
    config: dict[str, Any]
    """The resolved configuration by dotted names; empty if it was not stored."""
    evaluations: list[Row] = field(default_factory=list)
    """Of held-out problems, at some of the steps."""

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.config.get("name") or self.run_dir.resolve().name)

    @property
    def resumed_at(self) -> list[int]:
        """The first step of each continuation."""
        resumes = (event for event in self.events if event.get("kind") == "resume")
        return [event["step"] for event in resumes if isinstance(event.get("step"), int)]

    @property
    def step_numbers(self) -> np.ndarray:
        """The steps that have metrics."""
        return np.array([row["step"] for row in self.steps], dtype=float)

    @property
    def first_step(self) -> int:
        """Of what can be drawn: step 0 if the weights that the run began with were evaluated."""
        return min(int(row["step"]) for row in (*self.steps, *self.evaluations))

    def by_step(self, metric: str) -> Series:
        """A metric's mean of each step, at the step's number; of evaluations, at those that had one."""
        if metric.startswith("eval/") and self.evaluations:
            steps = np.array([row["step"] for row in self.evaluations], dtype=float)
            return Series(steps, _values(self.evaluations, metric))
        return Series(self.step_numbers, _values(self.steps, metric))

    def by_update(self, metric: str) -> Series:
        """A metric of each update: the updates of step ``s`` lie evenly in (s - 1, s], the last one on s."""
        steps = np.array([row["step"] for row in self.updates], dtype=float)
        _, first, count = np.unique(steps, return_index=True, return_counts=True)
        place = np.arange(len(steps)) - np.repeat(first, count)
        position = steps - 1 + (place + 1) / np.repeat(count, count)
        return Series(position, _values(self.updates, metric))


def read_run(run_dir: Path) -> RunRecord:
    """Read a run directory. Only metrics.jsonl has to be there, with at least one step."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: {run_dir} is not a run directory, or its run never started"
        )
    steps = read_jsonl(path)
    if not steps:
        raise ConfigError(f"{path} has no steps yet: there is nothing to report")
    return RunRecord(
        run_dir,
        steps,
        _read_optional(run_dir / "updates.jsonl"),
        _read_optional(run_dir / "events.jsonl"),
        read_config(run_dir) or {},
        _read_optional(run_dir / EVALUATIONS),
    )


def headline(rows: list[Row]) -> Headline:
    """The run in figures, from its metrics.jsonl: ``first`` and ``last`` are over a tenth of the steps,
    at least 1 and at most 5."""
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
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
    """The mean, None of nothing."""
    return sum(values) / len(values) if values else None


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centered mean over ``window`` (odd) neighbours, of those that exist; the ends have fewer."""
    exists = np.isfinite(values)
    box = np.ones(window)
    sums = np.convolve(np.where(exists, values, 0.0), box, mode="same")
    counts = np.convolve(exists.astype(float), box, mode="same")
    means = np.full_like(sums, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _values(rows: list[Row], metric: str) -> np.ndarray:
    return np.array([row.get(metric) for row in rows], dtype=float)  # None becomes NaN


def _read_optional(path: Path) -> list[Row]:
    return read_jsonl(path) if path.exists() else []
