"""Rollout-only run (``bapo train --rollout-only``): samples and scores the batches of all steps, no training.

The engines load the model's own weights once, as version 0. Every step's batch is formed as in training, and
kept in the run directory; ``--train-only`` trains on it. Started again, it continues after the last step that
is on disk with its metrics.
Used by ``commands/train.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from bapo_megatron.checkpoint.run_directory import store_config
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import Preempted, RunStopped
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.sampler.step_batches import step_path
from bapo_megatron.runtime.distributed import broadcast_from_main, is_main
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.preemption import PreemptionSignal
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.runtime.watchdog import Watchdog
from bapo_megatron.trainer.records.notifier import recorded_end, sending_events
from bapo_megatron.trainer.records.recorder import StepClock
from bapo_megatron.trainer.records.rollouts import RolloutRecord
from bapo_megatron.trainer.sampling import open_engines
from bapo_megatron.types import StepHeader

_WAIT_S = 5.0
"""Seconds that rank 0 waits for its sampler before the ranks meet again."""


def sample_steps(
    config: RunConfig, preemption: PreemptionSignal, event: dict[str, Any] | None = None
) -> None:
    """Rollout loop over the steps that are left. Collective: rank 0 does everything, the others wait.

    ``event``: an event of the start to record (``pin_threads``). Preempted or RunStopped on every rank if it
    stops before the end; the same command continues.
    """
    first_step = broadcast_from_main(next_step(config) if is_main() else None)
    if is_main():
        with _opened_record(config, first_step) as record:
            if event:
                record.event(event)
            if first_step <= config.steps:
                with open_engines(config, record.event) as (sampler, _):
                    _sample(config, preemption, first_step, sampler, record)
            record.finish()
    elif first_step <= config.steps:
        _sample(config, preemption, first_step, None, None)


def next_step(config: RunConfig) -> int:
    """The step to sample next: the first that lacks its metrics or its journal file. Reads files only."""
    paths = RunPaths(config.directory)
    recorded = {row["step"] for row in read_jsonl(paths.metrics)} if paths.metrics.exists() else set()
    step = 1
    while step in recorded and step_path(paths.journal, step).is_file():
        step += 1
    return step


@contextmanager
def _opened_record(config: RunConfig, first_step: int) -> Iterator[RolloutRecord]:
    store_config(config, samples_only=True)
    with (
        sending_events(config),
        closing(RolloutRecord(config, first_step)) as record,
        recorded_end(config, first_step <= config.steps, record.event),
    ):
        yield record


def _sample(
    config: RunConfig,
    preemption: PreemptionSignal,
    first_step: int,
    sampler: SamplerClient | None,
    record: RolloutRecord | None,
) -> None:
    """Rollout loop from ``first_step`` on. ``sampler``, ``record``: None on every rank but 0. Collective."""
    if sampler:
        sampler.start(first_step, None)
        sampler.load_weights(config.model.hf_path.absolute(), 0, first_step - 1)
    with closing(Watchdog(config.hang_minutes)) as watchdog:
        for step in range(first_step, config.steps + 1):
            clock = StepClock()
            batch = None
            while not broadcast_from_main(batch is not None):
                watchdog.beat()
                if reason := preemption.reason():
                    raise Preempted(f"{reason}; {step - 1} of {config.steps} steps are sampled")
                batch = _batch_if_ready(sampler, step)
            clock.lap("rollout")
            if record and batch:
                record.step(step, batch, clock)
            if sampler and step < config.steps:
                if step % config.checkpoint.every == 0:
                    sampler.checkpointed(0)  # trims the journal to unfinished groups
                sampler.keep_weights(step)


def _batch_if_ready(sampler: SamplerClient | None, step: int) -> StepHeader | None:
    """The header of ``step``, on rank 0, if it exists by now. RunStopped, on all ranks, if none will come."""
    batch, stopped = None, None
    try:
        batch = sampler.next_batch(step, _WAIT_S) if sampler else None
    except RunStopped as error:
        stopped = error
    if stopped := broadcast_from_main(stopped):
        raise stopped
    return batch if isinstance(batch, StepHeader) else None
