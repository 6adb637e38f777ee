"""Rollout-only run (``bapo train --rollout-only``): samples and scores the batches of all steps, no training.

Every rank calls ``sample_steps(config, ...)``; rank 0 does the work. The engines load the initial weights
once, as version 0. Each step's batch is formed as in training and kept in the run directory, for
``--train-only``. A restart continues after the last step on disk with metrics. ``RolloutRecord`` writes
metrics, a line per step and one of their means. ``sampled_shares`` returns the share of positive tokens in
BAPO's searches at ratios of 1, which shows whether BAPO can act.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from statistics import fmean
from typing import Any

from bapo_megatron.algo.advantages import Rewards, branch_advantages, build_advantage, is_uniform
from bapo_megatron.algo.bounds import BoundsConfig, sum_count
from bapo_megatron.algo.losses.clip import group_of_sequences
from bapo_megatron.algo.parts import CENTERED_ADVANTAGES
from bapo_megatron.checkpoint.run_directory import store_config
from bapo_megatron.config import AlgorithmConfig, RunConfig
from bapo_megatron.data.packing import updates_of_step
from bapo_megatron.errors import Preempted
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.sampler.step_batches import step_path
from bapo_megatron.runtime.distributed import barrier, broadcast_from_main, is_main, on_all_ranks
from bapo_megatron.runtime.guards import PreemptionSignal, Watchdog
from bapo_megatron.runtime.jsonl_log import Row, read_jsonl
from bapo_megatron.trainer.build import open_engines
from bapo_megatron.trainer.flow_control import WAIT_S
from bapo_megatron.trainer.records.progress import number_text, numbered_line
from bapo_megatron.trainer.records.recorder import (
    RunRecords,
    StepClock,
    recorded_end,
    sending_events,
    step_metrics,
)
from bapo_megatron.types import GroupHeader, Metrics, StepHeader


def sample_steps(
    config: RunConfig, preemption: PreemptionSignal, event: dict[str, Any] | None = None
) -> None:
    """Sample the remaining steps. Collective: rank 0 does the work. ``event``: event to record at the start.
    Raises Preempted or RunStopped, on every rank, on an early stop; the same command continues."""
    first_step = broadcast_from_main(next_step(config) if is_main() else None)
    if is_main():
        with _opened_record(config, first_step) as record:
            preemption.record = record.event
            if event:
                record.event(event)
            if first_step <= config.steps:
                with open_engines(config, record.event) as (sampler, _):
                    _sample(config, preemption, first_step, sampler, record)
            record.finish()
    elif first_step <= config.steps:
        _sample(config, preemption, first_step, None, None)


def next_step(config: RunConfig) -> int:
    """Return the first step without metrics or journal file. Only reads files."""
    paths = config.paths
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
    """Sample the steps from ``first_step``. ``sampler``, ``record``: None except on rank 0. Collective."""
    if sampler:
        sampler.start(first_step, None)
        sampler.load_weights(config.model.hf_path.absolute(), 0, first_step - 1)
    barrier()
    preemption.begun()
    with closing(Watchdog(config.hang_minutes)) as watchdog:
        for step in range(first_step, config.steps + 1):
            clock = StepClock()
            batch = None
            while batch is None:
                watchdog.beat()
                if reason := preemption.reason():
                    raise Preempted(f"{reason}; {step - 1} of {config.steps} steps are sampled")
                batch = _batch_if_ready(sampler, step)
            clock.lap("rollout")
            if record:
                record.step(step, batch, clock)
            if sampler and step < config.steps:
                if step % config.checkpoint.every == 0:
                    sampler.checkpointed(0)  # trims the journal to unfinished groups
                sampler.keep_weights(step)


def _batch_if_ready(sampler: SamplerClient | None, step: int) -> StepHeader | None:
    """Return the header of ``step``, if ready; raise RunStopped, on all ranks, if none can come."""
    batch = on_all_ranks(lambda: sampler.next_batch(step, WAIT_S) if sampler else None)[0]
    return batch if isinstance(batch, StepHeader) else None


SHARE = "bapo/sampled_positive_share"
"""Metric: positive share of a step's groups at ratios of 1, by ``loss_mean``; None if all advantages are
0."""
BELOW = "bapo/sampled_searches_below"
"""Metric: share of a step's searches below the target; None if this share does not decide the search."""


def sampled_shares(
    groups: Sequence[GroupHeader], algorithm: AlgorithmConfig, seed: int, step: int
) -> Metrics:
    """Return the metrics of the positive share of ``groups``: over the whole step, and in a run's searches.

    Splits as a run with ``seed`` does: groups into updates, in each pass, and an update's responses into
    searches of about ``bounds_tokens`` tokens (``scope=micro_batch``) or into one. A search's share is the
    sum of A over its positive tokens divided by the sum of abs(A) over all its trained tokens: the
    contribution of Eq. 8 with ``share="absolute"`` and ``weight="uniform"`` at ratios of 1, with the weights
    of ``loss_mean`` (equal tokens or equal responses). Advantages in a group sum to 0, so only lengths move
    the share of whole groups from 1/2, and in a mean over sequences only responses without trained tokens do.
    A search within an update sees few responses, so its share also depends on which ones.
    """
    values_N = build_advantage(algorithm)(Rewards.of_step(groups))
    values = iter(branch_advantages(groups, values_N, algorithm.branch_reward))
    responses = [_responses(group, values, algorithm) for group in groups]
    shares: Metrics = {SHARE: _share([response for group in responses for response in group])}
    uses = algorithm.reuse_epochs, algorithm.updates_per_epoch
    below = [
        share < algorithm.bounds.target
        for _, update in updates_of_step(responses, *uses, seed, step)
        for search in _searches([response for group in update for response in group], algorithm.bounds)
        if (share := _share(search)) is not None
    ]
    is_known = below and _share_decides(algorithm)
    return {**shares, BELOW: sum(below) / len(below) if is_known else None}


_Response = tuple[float, int]
"""Weighted sum of a response's token advantages, and its number of trained tokens."""


def _responses(group: GroupHeader, values: Iterator[float], algorithm: AlgorithmConfig) -> list[_Response]:
    tokens_G = [response.trained_tokens for response in group.responses]
    by_token = algorithm.loss_mean != "sequence"
    return [(next(values) * (tokens if by_token else min(tokens, 1)), tokens) for tokens in tokens_G]


def _share(responses: Sequence[_Response]) -> float | None:
    """Return the share of positive tokens; None if all advantages are 0."""
    total = sum(abs(advantage) for advantage, _ in responses)
    return sum(max(advantage, 0.0) for advantage, _ in responses) / total if total else None


def _searches(update: Sequence[_Response], bounds: BoundsConfig) -> list[list[_Response]]:
    numbers = [0] * len(update)
    if bounds.grouped and bounds.bounds_tokens:
        numbers = [*group_of_sequences(tuple(tokens for _, tokens in update), bounds.bounds_tokens)]
    searches: list[list[_Response]] = [[] for _ in range(1 + max(numbers, default=-1))]
    for number, response in zip(numbers, update, strict=True):
        searches[number].append(response)
    return searches


def _share_decides(algorithm: AlgorithmConfig) -> bool:
    """Return whether this share decides the bounds: they are searched, in searches that are known without a
    layout, and training neither changes the groups' advantages nor leaves out responses."""
    bounds = algorithm.bounds
    is_known = bounds.scope != "micro_batch" or bounds.grouped
    changed = algorithm.polarity.enabled or algorithm.reference_kl.in_reward or algorithm.corrections.rejects
    changed = changed or bool(algorithm.masks) or algorithm.advantage not in CENTERED_ADVANTAGES
    is_theirs = (bounds.share, bounds.weight) == ("absolute", "uniform")
    return is_known and algorithm.loss == "clip" and sum_count(bounds) > 2 and is_theirs and not changed


_SHOWN = (
    ("reward", "sampled/reward/mean", ".3f"),
    ("right", "sampled/reward/correct_fraction", ".1%"),
    ("length", "sampled/rollout/length_mean", ".0f"),
    ("cut off", "sampled/rollout/truncated_fraction", ".1%"),
    ("positive share", SHARE, ".3f"),
    ("searches below target", BELOW, ".1%"),
    ("uniform groups", "rollout/groups_uniform", ".4g"),
    ("tokens/s", "time/tokens_per_s", ".0f"),
    ("failed", "sampled/reward/failures", ".4g"),
)
"""Parts of a line: name, metric, format. They also cover uniform groups, which no step gets."""


class RolloutRecord(RunRecords):
    """Writer of a rollout-only run's metrics, events and progress lines, on rank 0. The constructor records
    `start` or `resume` if steps are left. Call ``finish`` once all steps are sampled."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        super().__init__(config, first_step)
        if first_step <= config.steps:
            kind = self.begin(first_step, rollout_only=True)
            where = f"{config.directory}: {kind} at step {first_step} of {config.steps}"
            print(f"{where}, --rollout-only: nothing is trained or evaluated", flush=True)

    def step(self, step: int, header: StepHeader, clock: StepClock) -> None:
        """Write a step's metrics and print its line."""
        metrics = {
            **step_metrics(header, None, clock),
            "rollout/groups_uniform": _uniform_groups(header),
            **sampled_shares(header.groups, self._config.algorithm, self._config.seed, step),
        }
        self._metrics.write_step(step, metrics)
        print(numbered_line(step, self._config.steps, shown(metrics)), flush=True)
        self.warn_of_cut_episodes(step, metrics)

    def finish(self) -> None:
        """Print the means of all steps and commands for the rollouts."""
        rows = read_jsonl(self._paths.metrics)
        print("  ".join([f"{len(rows)} steps, means:", *shown(means(rows))]))
        root = self._paths.root
        print(f"responses: {self._paths.journal}")
        print(f"train on them: bapo train RECIPE --train-only {root}")
        print(f"plots: bapo report {root}", flush=True)


def shown(metrics: Metrics) -> list[str]:
    """Return the parts of a line about a step or a run, with a dash for a missing number."""
    return [f"{name} {number_text(metrics.get(metric), style)}" for name, metric, style in _SHOWN]


def means(rows: Sequence[Row]) -> Metrics:
    """Return the means of the shown metrics over steps; None without a value."""
    known = {metric: [row[metric] for row in rows if row.get(metric) is not None] for _, metric, _ in _SHOWN}
    return {metric: fmean(values) if values else None for metric, values in known.items()}


def _uniform_groups(header: StepHeader) -> float:
    """Return the number of groups with equal rewards: dropped ones and those in the batch."""
    kept = sum(is_uniform([rows[0].reward for rows in group.episodes]) for group in header.groups)
    return (header.metrics.get("rollout/groups_dropped") or 0.0) + kept
