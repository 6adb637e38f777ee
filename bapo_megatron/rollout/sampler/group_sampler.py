"""The sampler inside its process: what the trainer asks of it, and the parts that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.data.mixture import data_order
from bapo_megatron.rollout.engines.pool import EnginePool, Report
from bapo_megatron.rollout.engines.requests import Dataset, identity
from bapo_megatron.rollout.sampler.admission import AdmissionController
from bapo_megatron.rollout.sampler.batch_builder import BatchBuilder
from bapo_megatron.rollout.sampler.beginning import OUTSTANDING, beginning
from bapo_megatron.rollout.sampler.dispatcher import Dispatcher
from bapo_megatron.rollout.sampler.event_log.events import steps_rewound, weights_loaded
from bapo_megatron.rollout.sampler.event_log.journal import SegmentJournal
from bapo_megatron.rollout.sampler.event_log.state import FinishedGroup, SamplerState
from bapo_megatron.rollout.sampler.event_log.write_ahead_log import Record
from bapo_megatron.rollout.sampler.loop import SamplerLoop
from bapo_megatron.rollout.sampler.scoring import GroupScorer, Scorer
from bapo_megatron.rollout.sampler.step_batches import StepFiles, step_path
from bapo_megatron.runtime.run_paths import RunPaths


class GroupSampler:
    """Turns prompts into the batches of steps: groups of rewarded responses. Lives in one event loop."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        pool: EnginePool,
        scorer: Scorer,
        report: Report,
        rounds: bool = False,
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the journal of the run. ConfigError if another process writes it.

        ``rounds``: open new groups, and form a batch, only when no group is open, so that an engine whose
        answers depend on what it is asked at the same time always gets the same requests together.
        ``is_held``: whether requests must wait, for such an engine has others to answer.
        """
        self._rollout, self._report, self._pool = config.rollout, report, pool
        self._folder = RunPaths(config.directory).journal
        self._journal = SegmentJournal(self._folder)
        self._files = StepFiles(self._folder, report)
        prompts, rollout = dataset.prompts, config.rollout
        self._identity = identity(config, dataset)
        self._state = state = SamplerState(prompts, rollout.group_size, self._identity)
        self._admission = admission = AdmissionController(rollout, state)
        self._dispatcher = dispatcher = Dispatcher(config, dataset, state, admission, pool)
        self._batches = BatchBuilder(config, state, admission, pool, self._folder, rounds)
        self._loop = SamplerLoop(
            rollout,
            data_order(len(prompts), dataset.sources, config.seed, config.data.shuffle),
            state,
            self._journal,
            admission,
            dispatcher,
            GroupScorer(dataset, scorer),
            pool.changed,
            report,
            rounds,
            is_held,
        )

    async def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Replay the journal, and begin before ``first_step``; ``state`` is that of the last checkpoint."""
        for damage in await asyncio.to_thread(self._journal.replay, self._state.apply):  # gigabytes of it
            self._report("journal_damaged", detail=damage)
        opened: list[Record] = []
        if self._state.is_empty and state:
            begun = beginning(state, self._identity, first_step - 1)
            self._state.apply(begun.state)
            opened = begun.opened
            self._report(begun.kind, detail=begun.message)
        self._journal.rotate(self._state.snapshot(), *opened)
        for record in opened:
            self._state.apply(record)
        missing = await asyncio.to_thread(self._files.missing_records, self._state, first_step)
        if missing:  # or the next process would count their groups once more
            await asyncio.to_thread(self._journal.commit, missing)
        for record in missing:
            self._state.apply(record)
        self._admission.trainer_has(first_step - 1)
        self._loop.start()

    @property
    def needs_weights(self) -> bool:
        """Whether no engine works, and only the trainer can bring the weights that one needs."""
        return self._pool.needs_weights

    async def next_batch(self, step: int, wait_s: float) -> Path | None:
        """The file of the batch of ``step``; None if it cannot be formed within ``wait_s`` seconds.

        EnginesGone if no engine has worked for too long. Raises the error that has ended the loop.
        """
        path = step_path(self._folder, step)
        if step <= self._state.served:
            if self._files.is_readable(step):
                self._admission.trainer_has(step)
                return path
            self._loop.post(steps_rewound(step - 1))
        self._admission.trainer_has(step - 1)
        self._loop.drop_stale(self._state.finished.values(), step)
        if not await self._loop.wait_for(lambda: self._choose(step) is not None, wait_s):
            self.check_engines()
            return None
        async with self._loop.between_commits():
            self._loop.post(await self._batches.write(step, self._choose(step) or []))
        self._admission.trainer_has(step)
        if self._rollout.max_staleness and not self._rollout.overlap:
            await self._pool.abort()
        return path

    def check_engines(self) -> None:
        """Raise EnginesGone if no engine has worked for ``lost_minutes``."""
        self._pool.check(self._rollout.engine_config.lost_minutes)

    async def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Load weights, which the updates of ``step`` made, from ``folder`` into every engine that works."""
        self.expect_weights(version)
        await self._pool.update(folder, version)
        self.record_weights(version, step)

    def expect_weights(self, version: int) -> None:
        """Accept tokens of the weights ``version`` from now on: engines begin to load them."""
        self._dispatcher.expect_weights(version)

    def record_weights(self, version: int, step: int) -> None:
        """Record that the engines have loaded the weights ``version``, which the updates of ``step`` made."""
        self._loop.post(weights_loaded(version, step))

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, needed for a fork, or if the journal is lost: place in the dataset,
        counts, and the prompts in the making."""
        return {**self._state.snapshot().fields, OUTSTANDING: self._state.outstanding_places}

    async def checkpointed(self, oldest: int) -> None:
        """Start a new log; delete the files that no continuation after step ``oldest`` needs."""
        if (keep := self._rollout.keep_steps) is not None:
            await asyncio.to_thread(self._files.delete, min(oldest, self._state.served - keep))
        async with self._loop.between_commits():
            self._journal.rotate(self._state.snapshot())
            self._journal.delete_old([*self._state.open, *self._state.finished])

    async def close(self) -> None:
        """Stop, and keep the tokens of requests in flight, but in ``rounds``."""
        await self._loop.close()
        self._journal.close()

    def _choose(self, step: int) -> list[FinishedGroup] | None:
        return self._batches.choose(step, self._loop.is_exhausted)
