"""Group sampler: turns prompts into durable step files; connects state, journal, loop and dispatcher.

``GroupSampler.next_batch(step)`` returns the path of the step's file, or None if it is not ready. Everything
sampled is in the journal, which survives the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.data.prompts import data_order
from bapo_megatron.rollout.engines.pool import EnginePool, Report
from bapo_megatron.rollout.engines.requests import Dataset, identity
from bapo_megatron.rollout.sampler.dispatcher import AdmissionController, Dispatcher
from bapo_megatron.rollout.sampler.events import (
    OUTSTANDING,
    batch_served,
    journal_start,
    steps_rewound,
    weights_loaded,
)
from bapo_megatron.rollout.sampler.group_scoring import GroupScoring
from bapo_megatron.rollout.sampler.loop import SamplerLoop
from bapo_megatron.rollout.sampler.sampling_metrics import sampler_metrics
from bapo_megatron.rollout.sampler.scoring import Scorer
from bapo_megatron.rollout.sampler.state import FinishedGroup, SamplerState
from bapo_megatron.rollout.sampler.step_batches import StepFiles, step_path, write_step
from bapo_megatron.rollout.sampler.stepper import Stepper
from bapo_megatron.rollout.sampler.teacher import Teacher
from bapo_megatron.rollout.sampler.turns import Environments
from bapo_megatron.rollout.sampler.write_ahead_log import Record, SegmentJournal
from bapo_megatron.runtime.storage import OldFiles
from bapo_megatron.types import StepBatch


class GroupSampler:
    """The rollout sampler: turns prompts into step files of rewarded groups. ``Service`` (``process.py``)
    calls it for the trainer, in the sampler process.

    Call order: ``start``, which replays the journal; ``load_weights`` (or, for weights sent in parts,
    ``expect_weights`` and ``record_weights``), before which nothing is sampled; ``next_batch`` per step;
    ``close``. A loop error (such as a full disk) ends the sampling, and ``next_batch`` raises it.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        pool: EnginePool,
        scorer: Scorer,
        report: Report,
        rounds: bool = False,
        is_held: Callable[[], bool] = lambda: False,
        environments: Environments = MappingProxyType({}),
        teacher: Teacher | None = None,
    ) -> None:
        """Open the run's journal. Raises ConfigError if another process writes it. ``rounds``: open new
        groups and form batches only when no group is open, so that an engine whose answers depend on its
        batch always gets the same batches. ``is_held``: whether requests must wait because such an engine
        serves an evaluation. ``environments``: by prompt source, of sources with one. ``teacher``:
        scores groups for distillation."""
        self._config, self._report, self._pool, self._rounds = config, report, pool, rounds
        self._folder = config.paths.journal
        self._journal = SegmentJournal(self._folder, OldFiles(report))
        self._files = StepFiles(self._folder, report)
        prompts, rollout = dataset.prompts, config.rollout
        self._identity = identity(config, dataset)
        self._state = state = SamplerState(prompts, rollout.group_size, self._identity)
        self._admission = admission = AdmissionController(rollout, state)
        self._dispatcher = dispatcher = Dispatcher(config, dataset, state, admission, pool, environments)
        self._loop = SamplerLoop(
            rollout,
            data_order(len(prompts), dataset.sources, config.seed, config.data.shuffle),
            state,
            self._journal,
            admission,
            dispatcher,
            GroupScoring(config, dataset, scorer, report, teacher),
            pool.changed,
            report,
            rounds,
            is_held,
            Stepper(config, dataset, state, environments, pool.changed.set),
        )

    async def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Replay the journal and resume at ``first_step``. ``state``: from the preceding checkpoint."""
        # In a thread, as all work on the disk: the event loop must send heartbeats, and a disk may hang.
        for damage in await asyncio.to_thread(self._journal.replay, self._state.apply):
            self._report("journal_damaged", detail=damage)
        opened: list[Record] = []
        if self._state.is_empty and state:
            (snapshot, *opened), kind, told = journal_start(state, self._identity, first_step - 1)
            self._state.apply(snapshot)
            self._report(kind, detail=told)
        # Snapshot and reopened groups share a commit: a kill between two commits would lose prompts.
        await asyncio.to_thread(self._journal.rotate, self._state.snapshot(), *opened)
        for record in opened:
            self._state.apply(record)
        missing = await asyncio.to_thread(self._files.missing_records, self._state, first_step)
        if missing:  # without this commit, the next process would count their groups again
            await asyncio.to_thread(self._journal.commit, missing)
        for record in missing:
            self._state.apply(record)
        self._admission.trainer_has(first_step - 1)
        self._loop.start()

    async def next_batch(self, step: int, wait_s: float) -> Path | None:
        """Return the file of ``step``, after writing it if necessary; None if too few groups are finished
        within ``wait_s`` seconds. The step of a damaged file is sampled again. Raises EnginesGone if no
        engine has worked for too long, or the error that ended the loop."""
        path = step_path(self._folder, step)
        # Idempotent: a step served before a kill or resume gets the same file again.
        if step <= self._state.served:
            # In a thread: routes are gigabytes, and the event loop must send heartbeats.
            if await asyncio.to_thread(self._files.is_readable, step):
                self._admission.trainer_has(step)
                return path
            self._loop.post(steps_rewound(step - 1))
        self._admission.trainer_has(step - 1)
        self._admission.trainer_asks(step)
        self._loop.drop_stale(self._state.finished.values(), step)
        if not await self._loop.wait_for(lambda: self._choose(step) is not None, wait_s):
            self.check_engines()
            return None
        # Chosen again inside the block because a commit may have dropped groups.
        async with self._loop.between_commits():
            self._loop.post(await self._write(step, self._choose(step) or []))
        self._admission.trainer_has(step)
        rollout = self._config.rollout
        if rollout.max_staleness and not rollout.overlap:
            # Without overlap, unfinished responses continue only under the new weights.
            await self._pool.abort()
        return path

    def check_engines(self) -> None:
        self._pool.check(self._config.rollout.engine_config.lost_minutes)

    async def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Load the weights in ``folder``, produced by ``step``, into every working engine."""
        # Expected before the load, during which fast engines already sample; the record opens admission.
        self.expect_weights(version)
        await self._pool.update(folder, version)
        self.record_weights(version, step)

    def expect_weights(self, version: int) -> None:
        """Accept tokens of weight ``version`` from now on, because engines begin to load it."""
        self._dispatcher.expect_weights(version)

    def record_weights(self, version: int, step: int) -> None:
        """Record that the engines have loaded weight ``version``, produced by ``step``."""
        self._loop.post(weights_loaded(version, step))

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state, for a fork or a lost journal: the state snapshot, with the dataset
        position and counts, and the unfinished groups' prompts."""
        return {**self._state.snapshot().fields, OUTSTANDING: self._state.outstanding_places}

    async def checkpointed(self, oldest: int) -> int:
        """Start a new log; delete logs and step files that no resume from ``oldest`` needs, except the last
        ``rollout.keep_steps`` step files. Returns the last step deleted, below 1 for none."""
        keep = self._config.rollout.keep_steps
        last = 0 if keep is None else min(oldest, self._state.served - keep)
        await asyncio.to_thread(self._files.delete, last)
        async with self._loop.between_commits():
            # The snapshot makes older logs without unfinished groups redundant.
            await asyncio.to_thread(self._journal.rotate, self._state.snapshot())
            outstanding = [*self._state.open, *self._state.finished]
            await asyncio.to_thread(self._journal.delete_old, outstanding)
        return last

    async def close(self) -> None:
        """Stop sampling; unless in ``rounds``, commit the tokens of in-flight requests."""
        await self._loop.close()
        self._journal.close()

    def _choose(self, step: int) -> list[FinishedGroup] | None:
        """Return the groups of ``step``: the finished ones that were opened first, except those to drop as
        stale; None while there are too few. If no more can come, the step takes what there is, even none."""
        count, is_last = self._config.rollout.prompts_per_step, self._loop.is_exhausted
        if not is_last and (self._rounds or len(self._state.finished) < count):
            return None
        groups = (group for _, group in sorted(self._state.finished.items()))
        fresh = [group for group in groups if not self._admission.must_drop(group, step)]
        return fresh[:count] if is_last or len(fresh) >= count else None

    async def _write(self, step: int, groups: Sequence[FinishedGroup]) -> Record:
        """Write the step's file and return the event that records it. After a kill before the event's commit,
        the next start rebuilds the event from the file (``StepFiles.missing_records``)."""
        numbers = [group.number for group in groups]
        stale = sum(self._admission.is_stale(group, step) for group in groups)
        config = self._config
        metrics = sampler_metrics(self._state, groups, stale, config.reward, config.data.source_names)
        metrics["sampler/engines"] = float(self._pool.up)
        batch = StepBatch(tuple(group.group for group in groups), metrics)
        await asyncio.to_thread(write_step, self._folder, step, batch, numbers)
        return batch_served(step, numbers)
