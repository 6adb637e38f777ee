"""Recorder of a run, on rank 0: metrics files, events.jsonl, progress lines, warnings, and the run's end.

``trainer/build.py`` opens three context managers, outermost first: ``sending_events`` runs the event sender
process (``runtime/event_sender.py``), ``Recorder`` writes each step, ``recorded_end`` records how the run
ends (done, preempted, stopped, failed), so this event is sent, too. ``step_metrics`` returns a step's
metrics, ``StepClock`` its times. If none of the first 16 stale updates of a start moves BAPO's bounds, the
recorder notes, once, the fixed bounds to which the run is equivalent so far.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from bapo_megatron.algo.bounds import BoundsConfig, describe
from bapo_megatron.checkpoint.store import Saved
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import Preempted, RunStopped
from bapo_megatron.runtime.child_process import end_modules, start_module
from bapo_megatron.runtime.event_kinds import OnEvent, last_turn
from bapo_megatron.runtime.event_sender import SenderSettings
from bapo_megatron.runtime.files import others_may_write
from bapo_megatron.runtime.jsonl_log import EventLog, rows_from_end
from bapo_megatron.trainer.records.metrics_log import MetricsLog, last_wait_s
from bapo_megatron.trainer.records.progress import Progress, evaluation_line
from bapo_megatron.types import Metrics, StepHeader

MOVED = "bapo/bounds_moved"
"""Metric: whether a stale update moved a bound, 1 or 0; None in an on-policy update, absent if not
searched."""
MOVES = frozenset({MOVED, "bapo/moved_tokens"})
"""Metrics of stale updates only; ``moved_tokens``: share of tokens with a bound moved by their own search."""


_STALE_UPDATES = 16
"""Stale updates without a move before the notice: two steps of the usual reuse."""


class IdleSearch:
    """Counter of stale updates (ratios not all 1) that move no bound. ``observe`` returns a notice, once,
    after 16 of them, unless a bound has moved before."""

    def __init__(self, bounds: BoundsConfig) -> None:
        self._bounds = bounds
        self._idle: list[tuple[int, float]] = []
        """Step and contribution of each stale update."""
        self._is_over = False

    def observe(self, step: int, updates: Sequence[Metrics]) -> str | None:
        """Count the updates of ``step``; return the notice if it is due, otherwise None."""
        self._is_over |= any(update.get(MOVED) for update in updates)
        stale = [update for update in updates if update.get(MOVED) == 0]
        self._idle += [(step, update.get("bapo/contribution") or 0.0) for update in stale]
        if self._is_over or len(self._idle) < _STALE_UPDATES:
            return None
        self._is_over = True
        return self._message()

    def _message(self) -> str:
        bounds, steps = self._bounds, [step for step, _ in self._idle]
        share = sum(share for _, share in self._idle) / len(steps)
        why = ""
        if math.isfinite(share) and share >= bounds.target:
            why = (
                f", because positive tokens hold {share:.2g} of the {bounds.measure}, above the target of "
                f"{bounds.target:g}"
            )
        return (
            f"the bounds have not moved in the last {len(steps)} stale updates (steps {steps[0]} to "
            f"{steps[-1]}), in which this run equals fixed({bounds.low_start:g}, {bounds.high_start:g}){why} "
            f"(docs/algorithm.md#which-preset)"
        )


class RunRecords:
    """Base class of recorders, on rank 0: writer of a run's metrics and events. Steps count from 1. The
    constructor drops the metrics of ``first_step`` and later steps. ``event`` is thread-safe; servers and
    exports report through it. Raises RunStopped if a write fails. Call ``close``."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        self._config, self._paths = config, config.paths
        self._events = EventLog(self._paths.events)
        self._metrics = MetricsLog(self._paths, config.logging, first_step - 1, self._events.event)
        self._warned: set[str] = set()

    def begin(self, first_step: int, **fields: Any) -> str:
        """Record `start` or `resume`, with ``fields``; return the kind."""
        kind = "start" if first_step == 1 else "resume"
        self._events.event(kind, step=first_step, **fields)
        return kind

    def event(self, event: dict[str, Any]) -> None:
        """Record an event: its kind and fields."""
        self._events.event(**event)

    def warning(self, kind: str, step: int, message: str) -> None:
        """Record an event of this ``kind``; print its message the first time."""
        self._events.event(kind, step=step, message=message)
        if kind not in self._warned:
            print(f"warning: {message}", flush=True)
        self._warned.add(kind)

    def warn_of_cut_episodes(self, step: int, metrics: Metrics) -> None:
        """Warn of each source whose episodes all ended at a limit, without a reward of their environment."""
        for source in self._config.data.source_names or ("",):
            prefix = f"sampled/source/{source}/environment/" if source else "sampled/environment/"
            cut = sum(metrics.get(f"{prefix}finish_{limit}") or 0.0 for limit in ("turns", "length"))
            if cut < 1 - 1e-9 or any(name.startswith(f"{prefix}reward_turn_") for name in metrics):
                continue
            message = (
                f"step {step}: all episodes{f' of source {source}' if source else ''} were cut at "
                f"environment.max_turns or rollout.max_response_tokens ({prefix}finish_...), before their "
                "environment gave a reward, so reward.function judged the model's last turn: if the "
                "environment gives one at its end, raise what cut them"
            )
            self.warning("episodes_cut", step, message)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


class Recorder(RunRecords):
    """Writer of a training run's metrics, events and progress lines. The constructor records and prints
    `start` or `resume`, and prints warnings about settings; without work left it prints that all is done."""

    def __init__(self, config: RunConfig, first_step: int, has_work: bool) -> None:
        super().__init__(config, first_step)
        self._idle_search = IdleSearch(config.algorithm.bounds)
        self._progress = Progress(config.steps)
        root = self._paths.root
        if not has_work:
            print(
                f"{root}: all {config.steps} steps are done; raise --steps to continue, or give another "
                "--run-dir"
            )
            return
        processes = torch.distributed.get_world_size()
        kind = self.begin(first_step, processes=processes)
        where = f"step {first_step} of {config.steps}"
        if first_step > config.steps:
            where = f"the evaluation of step {config.steps}"
        print(f"{root}: {kind} at {where}, processes: {processes}", flush=True)
        if config.algorithm.loss == "clip":
            print(f"clipping bounds: {describe(config.algorithm.bounds)}", flush=True)
        if text := others_may_write(root):
            print(f"warning: {text}", flush=True)

    def step(self, step: int, updates: Sequence[Metrics], metrics: Metrics) -> None:
        """Write the metrics of a step and its updates, and print the progress line."""
        for number, update in enumerate(updates):
            self._metrics.write_update(step, {"update": number, **update})
        self._metrics.write_step(step, metrics)
        self._progress.update(step, metrics)
        if message := self._idle_search.observe(step, updates):
            self._events.event("bounds_idle", step=step, message=message)
            print(f"note: {message}", flush=True)
        self._warn_of_rejections(step, updates)
        self.warn_of_cut_episodes(step, metrics)

    def _warn_of_rejections(self, step: int, updates: Sequence[Metrics]) -> None:
        empty = [n for n, row in enumerate(updates) if row.get("corrections/rejected_responses") == 1.0]
        if empty:
            message = (
                f"step {step}: no optimizer step in update {', '.join(map(str, empty))} of updates.jsonl: "
                "all responses are rejected; masks/... there says by which of algorithm.masks, if not by "
                "algorithm.corrections"
            )
            self.warning("all_rejected", step, message)

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Write and print the held-out metrics of the weights after ``step``, unless written before."""
        if self._metrics.write_evaluation(step, metrics):
            self._events.event("evaluation", step=step, mean=metrics["eval/mean"])
            print(evaluation_line(step, metrics), flush=True)

    def engine_gap(self, step: int, message: str, on_gap: Literal["warn", "stop"]) -> None:
        """Record an engine mismatch; print it unless the run stops with the same message."""
        self._events.event("engine_gap", step=step, on_gap=on_gap, message=message)
        if on_gap == "warn":
            print(f"warning: {message}", flush=True)

    def no_updates(self) -> None:
        """Record a warning that the run ends without any update."""
        message = (
            "the run has made no update, so its model is the one that it began with: each step's line says "
            "why (docs/troubleshooting.md#learning)"
        )
        self.warning("no_updates", self._config.steps, message)

    def saving(self, step: int, stall_s: float) -> None:
        """Record the start of a save and the seconds that training paused for it."""
        self._events.event("saving", step=step, stall_s=round(stall_s, 3))

    def checkpoint(self, saved: Saved) -> None:
        self._events.event(
            "checkpoint", step=saved.step, updates=saved.updates, seconds=round(saved.seconds, 3)
        )

    def export(self, step: int, path: Path) -> None:
        self._events.event("export", step=step, path=str(path))

    def is_exported(self, path: Path) -> bool:
        """Return whether the final export exists in ``path`` and is newer than the newest checkpoint."""
        ends = ("export", "checkpoint")
        newest = next((row for row in rows_from_end(self._paths.events) if row.get("kind") in ends), {})
        is_last = newest.get("kind") == "export" and newest.get("step") == self._config.steps
        return is_last and (path / "config.json").is_file()


class StepClock:
    """Stopwatch for a step's parts (rollout, update, sync): ``lap`` ends one; wall seconds on this rank."""

    def __init__(self) -> None:
        self._start = self._last = perf_counter()
        self._laps: Metrics = {}

    def lap(self, part: str) -> None:
        """Record the seconds since the last lap as ``part``."""
        now = perf_counter()
        self._laps[f"time/{part}_s"] = now - self._last
        self._last = now

    def metrics(self) -> Metrics:
        """Return the seconds of all laps, and their sum."""
        return {**self._laps, "time/step_s": self._last - self._start}


def step_metrics(header: StepHeader, updates: Sequence[Metrics] | None, clock: StepClock) -> Metrics:
    """Return a step's metrics: those of its rollouts, means (or maxima) over its updates, and times.
    ``updates``: None if nothing is trained."""
    metrics: Metrics = {**header.metrics, **_named_rewards(header)}
    if updates is not None:
        taken = [update for update in updates if update.get("policy/tokens") != 0.0]  # those with responses
        metrics |= {**_means(updates), "policy/updates": len(taken)}
    metrics |= clock.metrics()
    seconds = metrics["time/step_s"] or 1.0
    metrics["time/tokens_per_s"] = (metrics.get("sampled/rollout/tokens") or 0.0) / seconds
    return metrics


def _named_rewards(header: StepHeader) -> Metrics:
    each = [rows[0].named_rewards for group in header.groups for rows in group.episodes]
    names = sorted({name for named in each for name in named})
    return {
        f"reward/named/{name}": sum(rewards.get(name, 0.0) for rewards in each) / len(each) for name in names
    }


def _means(updates: Sequence[Metrics]) -> Metrics:
    """Return each metric's mean over the updates that have it (maximum for names in max); None for none."""
    names = dict.fromkeys(name for update in updates for name in update if "/" in name)  # not `version`
    means: Metrics = {}
    for name in names:
        values = [value for update in updates if (value := update.get(name)) is not None]
        if name.endswith(("/max", "_max")):
            means[name] = max(values, default=None)
        else:
            means[name] = sum(values) / len(values) if values else None
    return means


_LAST_S, _ENDING_S = 30.0, 5.0
"""Seconds that the sender has for the last events, and then to end."""


@contextmanager
def recorded_end(config: RunConfig, has_work: bool, event: OnEvent) -> Iterator[None]:
    """Context manager around a run: records its end event, `done`, `preempted`, `stopped` or `failed`.
    ``has_work``: whether steps were left; restarting a finished run records no second `done`."""
    try:
        yield
    except BaseException as error:
        with suppress(RunStopped, OSError):  # a full disk must not hide the error that ended the run
            event(_end_event(error))
        raise
    if has_work or last_turn(rows_from_end(config.paths.events)) != "done":
        event({"kind": "done", "step": config.steps})


def _end_event(error: BaseException) -> dict[str, Any]:
    if isinstance(error, KeyboardInterrupt):
        return {"kind": "stopped", "reason": "Ctrl-C"}
    if isinstance(error, Preempted | RunStopped):
        kind = "preempted" if isinstance(error, Preempted) else "stopped"
        return {"kind": kind, "reason": str(error)}
    return {"kind": "failed", "reason": f"{type(error).__name__}: {error}"}


@contextmanager
def sending_events(config: RunConfig) -> Iterator[None]:
    """Context manager: a run's event sender process, on rank 0, if ``logging.on_event`` has a target. On exit
    waits up to 30 s, or 10 s after Ctrl-C or preemption (plus 5 s), then kills it. An early end warns."""
    if not config.logging.on_event:
        yield
        return
    process = _start_sender(config)
    try:
        yield
    finally:
        _close_sender(process, last_wait_s(_LAST_S), config)


def _start_sender(config: RunConfig) -> subprocess.Popen[bytes]:
    paths, logging = config.paths, config.logging
    order = SenderSettings(
        run_dir=str(paths.root.absolute()),
        name=config.name,
        targets=logging.on_event,
        offset=paths.events.stat().st_size if paths.events.exists() else 0,
        steps=config.steps,
        evaluate_every=config.evaluation.every,
        stalled_minutes=logging.stalled_minutes,
    )
    paths.logs.mkdir(exist_ok=True)
    program = "bapo_megatron.runtime.event_sender", str(os.getpid())
    with paths.on_event_log.open("ab") as log:
        process = start_module(*program, stdin=subprocess.PIPE, stdout=log, stderr=log)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which `_close_sender` tells
        process.stdin.write(order.line())
        process.stdin.flush()
    return process


def _close_sender(process: subprocess.Popen[bytes], limit_s: float, config: RunConfig) -> None:
    """End the sender: send the time limit of its last events, then kill it if it hangs."""
    end_modules([process], f"{limit_s}\n".encode(), limit_s + _ENDING_S)
    if process.returncode:
        log = config.paths.on_event_log
        text = f"the process that sends events has ended with {process.returncode}: {log}"
        with suppress(OSError):
            print(f"warning: logging.on_event: {text}", file=sys.stderr, flush=True)
