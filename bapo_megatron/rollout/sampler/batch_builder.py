"""The batch builder: selects the finished groups of a training step, and writes the step's file.

With it the metrics of the sampling: rewards, lengths, truncation, and an account of all sampled tokens.
``GroupSampler.next_batch`` asks it. Used by ``group_sampler.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.sampler.admission import AdmissionController
from bapo_megatron.rollout.sampler.episode_metrics import episode_metrics
from bapo_megatron.rollout.sampler.event_log.events import batch_served
from bapo_megatron.rollout.sampler.event_log.state import FinishedGroup, GroupSummary, SamplerState
from bapo_megatron.rollout.sampler.event_log.write_ahead_log import Record
from bapo_megatron.rollout.sampler.step_batches import write_step
from bapo_megatron.types import Metrics, StepBatch


class BatchBuilder:
    """The builder of a step's batch: the finished groups that were opened first, but for those to be dropped.

    Part of ``GroupSampler``: ``choose``, then ``write``, between two commits of the sampler's loop.
    """

    def __init__(
        self,
        config: RunConfig,
        sampler_state: SamplerState,
        admission: AdmissionController,
        pool: EnginePool,
        folder: Path,
        rounds: bool,
    ) -> None:
        """``folder``: of the step files. ``rounds``: see ``GroupSampler``."""
        self._config, self._state, self._admission, self._pool = config, sampler_state, admission, pool
        self._folder, self._rounds = folder, rounds

    def choose(self, step: int, is_last: bool) -> list[FinishedGroup] | None:
        """Select the groups of ``step``; None if there are too few and more may come.

        ``is_last``: no more can come, so the step takes what there is, even nothing.
        """
        count = self._config.rollout.prompts_per_step
        if not is_last and (self._rounds or len(self._state.finished) < count):
            return None
        groups = (group for _, group in sorted(self._state.finished.items()))
        fresh = [group for group in groups if not self._admission.must_drop(group, step)]
        return fresh[:count] if is_last or len(fresh) >= count else None

    async def write(self, step: int, groups: Sequence[FinishedGroup]) -> Record:
        """Write the step's file, and return the event that records it.

        The file comes before the event: from then on the groups belong to the step, and after a kill in
        between the next start makes the event from the file (``StepFiles.missing_records``).
        """
        numbers = [group.number for group in groups]
        stale = sum(self._admission.is_stale(group, step) for group in groups)
        config = self._config
        metrics = sampler_metrics(self._state, groups, stale, config.reward, config.data.source_names)
        metrics["sampler/engines"] = float(self._pool.up)
        batch = StepBatch(tuple(group.group for group in groups), metrics)
        await asyncio.to_thread(write_step, self._folder, step, batch, numbers)
        return batch_served(step, numbers)


def sampler_metrics(
    sampler_state: SamplerState,
    chosen: Sequence[FinishedGroup],
    stale: int,
    reward: RewardConfig,
    sources: Sequence[str] = (),
) -> Metrics:
    """The metrics of a step that trains on the groups ``chosen``, of which ``stale`` are too old.

    Counts from the start of the run: sampled = trained + dropped + kept (``sampler/tokens_*``). ``sources``:
    names of the run's sources; each has its own ``rollout_metrics`` and ``episode_metrics`` under
    ``source/NAME/``.
    """
    trained = sum(group.tokens for group in chosen)
    dropped = sum(count for kind, count in sampler_state.tokens.items() if kind.startswith("dropped_"))
    return {
        **rollout_metrics(sampler_state.scored, len(chosen), reward),
        **_by_source(sampler_state.scored, chosen, reward, sources),
        **episode_metrics(sampler_state.scored),
        "rollout/groups_dropped": float(sampler_state.dropped["uniform"]),
        "rollout/groups_stale": float(sampler_state.dropped["stale"] + stale),
        "sampler/groups_kept": float(sampler_state.outstanding - len(chosen)),
        "sampler/tokens_sampled": float(sampler_state.tokens["sampled"]),
        "sampler/tokens_trained": float(sampler_state.tokens["trained"] + trained),
        "sampler/tokens_dropped": float(dropped),
        "sampler/tokens_kept": float(sampler_state.outstanding_tokens - trained),
    }


def _by_source(
    scored: Sequence[GroupSummary],
    chosen: Sequence[FinishedGroup],
    reward: RewardConfig,
    sources: Sequence[str],
) -> Metrics:
    found: Metrics = {}
    for source in sources:
        kept = sum(one.group.prompt.source == source for one in chosen)
        own = [one for one in scored if one.source == source]
        metrics = {**rollout_metrics(own, kept, reward), **episode_metrics(own)}
        # Times have one name, which whoever compares two runs leaves out.
        named = {name: value for name, value in metrics.items() if not name.startswith("time/")}
        found |= {f"source/{source}/{name}": value for name, value in named.items()}
    return found


def rollout_metrics(scored: Sequence[GroupSummary], kept: int, reward: RewardConfig) -> Metrics:
    """Statistics of all responses scored for the step, before uniform groups are dropped.

    So the filter does not bias them. A response is correct if its reward is nearer to ``reward.correct`` than
    to ``reward.wrong``. A mean over nothing is None. Lengths are in tokens.
    """
    groups = sorted(scored)
    rewards = np.array([value for group in groups for value in group.rewards])
    lengths = np.array([length for group in groups for length in group.lengths])
    correct = np.abs(rewards - reward.correct) < np.abs(rewards - reward.wrong)
    truncated = np.array([reason == "length" for group in groups for reason in group.reasons])
    failures = sum(len(group.failures) for group in groups)
    correct_by_group = np.split(correct, np.cumsum([len(group.rewards) for group in groups])[:-1])
    return {
        "reward/mean": _mean(rewards),
        "reward/correct_fraction": _mean(correct),
        "reward/solved_none": _mean(np.array([not one.any() for one in correct_by_group])),
        "reward/solved_all": _mean(np.array([one.all() for one in correct_by_group])),
        "reward/failures": float(failures),
        "reward/failed_fraction": failures / len(rewards) if len(rewards) else None,
        "reward/timeouts": float(sum(group.failures.count("time") for group in groups)),
        "rollout/groups_sampled": float(len(groups)),
        "rollout/groups": float(kept),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(lengths.max()) if len(lengths) else None,
        "rollout/length_positive_mean": _mean(lengths[correct]),
        "rollout/length_negative_mean": _mean(lengths[~correct]),
        "rollout/truncated_fraction": _mean(truncated),
        "rollout/tokens": float(lengths.sum()),
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
