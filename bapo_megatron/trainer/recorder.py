"""Everything a run leaves behind for people: metrics, journal, events, and the progress line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from bapo_megatron.checkpoint.store import Saved
from bapo_megatron.config import RunConfig
from bapo_megatron.config.validation import flat
from bapo_megatron.runtime.jsonl_log import EventLog
from bapo_megatron.trainer.metrics_log import MetricsLog
from bapo_megatron.trainer.progress import Progress
from bapo_megatron.types import Metrics, StepBatch


class Recorder:
    """Writes a run's record. Lives on rank 0; steps count from 1."""

    def __init__(self, config: RunConfig, first_step: int, has_work: bool) -> None:
        directory = config.directory
        settings = {name: str(value) for name, value in flat(config).items()}
        self._metrics = MetricsLog(directory, config.logging, first_step - 1, settings)
        self._progress = Progress(config.steps, first_step)
        self._events = EventLog(directory / "events.jsonl")
        if not has_work:
            print(f"{directory} has made its {config.steps} steps; more --steps or another --run-dir go on")
            return
        kind, processes = "start" if first_step == 1 else "resume", torch.distributed.get_world_size()
        self._events.event(kind, step=first_step, processes=processes)
        where = f"step {first_step} of {config.steps}"
        if first_step > config.steps:
            where = f"the evaluation of step {config.steps}"
        print(f"{directory}: {kind} at {where}, processes: {processes}", flush=True)

    def step(self, step: int, updates: Sequence[Metrics], metrics: Metrics) -> None:
        """Write the metrics of a step and of its updates, and move the progress line."""
        for number, update in enumerate(updates):
            self._metrics.write_update(step, {"update": number, **update})
        self._metrics.write_step(step, metrics)
        self._progress.update(step, metrics)

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Write what the weights that ``step`` has made are worth on held-out problems."""
        if self._metrics.write_evaluation(step, metrics):
            self._events.event("evaluation", step=step, mean=metrics["eval/mean"])

    def engine_gap(self, step: int, message: str, on_gap: Literal["warn", "stop"]) -> None:
        """Note that engine and trainer disagree; say so unless the run stops with the same words."""
        self._events.event("engine_gap", step=step, on_gap=on_gap, message=message)
        if on_gap == "warn":
            print(f"warning: {message}", flush=True)

    def saving(self, step: int, stall_s: float) -> None:
        """Note that a checkpoint is being written, and how long the training stood still for it."""
        self._events.event("saving", step=step, stall_s=round(stall_s, 3))

    def checkpoint(self, saved: Saved) -> None:
        """Note a checkpoint that is whole."""
        self._events.event(
            "checkpoint", step=saved.step, updates=saved.updates, seconds=round(saved.seconds, 3)
        )

    def export(self, step: int, path: Path) -> None:
        """Note the final Hugging Face folder."""
        self._events.event("export", step=step, path=str(path))

    def event(self, event: dict[str, Any]) -> None:
        """Note what has happened elsewhere: a kind and its fields."""
        self._events.event(**event)

    def close(self) -> None:
        """Flush and release everything."""
        self._progress.close()
        self._metrics.close()
        self._events.close()


class StepClock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self._start = self._last = perf_counter()
        self._laps: Metrics = {}

    def lap(self, part: str) -> None:
        """The time since the last lap was spent on ``part``."""
        now = perf_counter()
        self._laps[f"time/{part}_s"] = now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        """From the beginning to the last lap."""
        return self._last - self._start

    def metrics(self) -> Metrics:
        """All laps, and their sum."""
        return {**self._laps, "time/step_s": self.total_s}


def step_metrics(
    batch: StepBatch, updates: Sequence[Metrics], clock: StepClock, names: Sequence[str]
) -> Metrics:
    """One flat row: what sampling measured, the means (or maxima) over the step's updates, and the times.

    ``names`` are the metrics that an update has: a step without updates has them as None.
    """
    means = _means(updates, names)
    metrics = {**batch.metrics, **means, "policy/updates": len(updates), **clock.metrics()}
    seconds = metrics["time/step_s"] or 1.0
    metrics["time/tokens_per_s"] = (metrics.get("rollout/tokens") or 0.0) / seconds
    return metrics


def _means(updates: Sequence[Metrics], expected: Sequence[str]) -> Metrics:
    """Mean of each metric over the updates that have it, of a maximum the largest; None where none has."""
    found = (name for update in updates for name in update if "/" in name)  # not `epoch`, `version`
    names = dict.fromkeys([*expected, *found])
    means: Metrics = {}
    for name in names:
        values = [value for update in updates if (value := update.get(name)) is not None]
        if name.endswith(("/max", "_max")):
            means[name] = max(values, default=None)
        else:
            means[name] = sum(values) / len(values) if values else None
    return means
