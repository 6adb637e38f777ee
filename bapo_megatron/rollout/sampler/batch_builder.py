"""The batch builder: selects the finished groups of a training step, and writes the step's file.

``GroupSampler.next_batch`` asks it once a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from bapo_megatron.config import RunConfig
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.sampler.admission import AdmissionController
from bapo_megatron.rollout.sampler.event_log.events import batch_served
from bapo_megatron.rollout.sampler.event_log.state import FinishedGroup, SamplerState
from bapo_megatron.rollout.sampler.event_log.write_ahead_log import Record
from bapo_megatron.rollout.sampler.metrics import sampler_metrics
from bapo_megatron.rollout.sampler.step_batches import write_step
from bapo_megatron.types import StepBatch


class BatchBuilder:
    """The builder of a step's batch: the finished groups that were opened first, without stale ones.

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
