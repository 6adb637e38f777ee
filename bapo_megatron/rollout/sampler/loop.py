"""Prompts in, groups of rewarded responses out: the sampler's loop.

One task advances the book whenever something has happened: it writes what engines and judges returned to the
journal, all in one record, and only then takes note of it; it judges whole groups, begins new ones as
``supply.py`` allows, and sends responses to engines (``dispatch.py``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.algo.filters import is_uniform
from bapo_megatron.config import RunConfig
from bapo_megatron.data.prompts import PromptOrder
from bapo_megatron.rollout.engines.pool import EnginePool, Report
from bapo_megatron.rollout.engines.requests import Dataset, identity
from bapo_megatron.rollout.sampler import events as records
from bapo_megatron.rollout.sampler.admission import AdmissionController
from bapo_megatron.rollout.sampler.dispatcher import Dispatcher
from bapo_megatron.rollout.sampler.journal import SegmentJournal
from bapo_megatron.rollout.sampler.metrics import sampler_metrics
from bapo_megatron.rollout.sampler.scoring import Scorer
from bapo_megatron.rollout.sampler.state import Finished, OpenGroup, SamplerState
from bapo_megatron.rollout.sampler.step_batches import step_path, write_step
from bapo_megatron.rollout.sampler.step_files import StepFiles
from bapo_megatron.rollout.sampler.write_ahead_log import Record
from bapo_megatron.types import StepBatch

MOST_RESAMPLES = 3
"""A prompt whose groups are too old time and again is given up after so many new beginnings."""

_DRAIN_S = 5.0
"""How long the end of a run waits for the tokens that engines have in hand."""


class GroupSampler:
    """The loop. Lives in one event loop, beside the engines of ``fleet``."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        pool: EnginePool,
        scorer: Scorer,
        report: Report,
        rounds: bool = False,
    ) -> None:
        """``rounds``: begin new groups, and give a step its own, only when no other is in the making, so that
        an engine which answers in batches always forms the same ones."""
        self._config, self._rollout = config, config.rollout
        self._dataset, self._pool, self._scorer, self._report = dataset, pool, scorer, report
        self._rounds = rounds
        self._order = PromptOrder(len(dataset.prompts), config.seed, config.data.shuffle)
        self._state = SamplerState(
            dataset.prompts, self._rollout.group_size, identity(config, len(dataset.prompts))
        )
        self._admission = AdmissionController(self._rollout, self._state)
        self._dispatcher = Dispatcher(config, dataset, self._state, self._admission, pool)
        self._dispatcher.refuse = self._refuse
        self._folder = config.directory / "journal"
        self._journal = SegmentJournal(self._folder)
        self._steps = StepFiles(self._folder, report)
        self._next_number = 0
        self._whole: list[OpenGroup] = []
        """Groups that wait for their judges."""
        self._scoring: dict[int, asyncio.Task[None]] = {}
        self._dropping: set[int] = set()
        """Groups whose drop is not in the book yet."""
        self._resampled: Counter[tuple[int, int]] = Counter()
        self._news: list[Record] = []
        """Records that wait for their commit."""
        self._changed, self._advanced = pool.changed, asyncio.Condition()
        self._failure: Exception | None = None
        self._closing = False
        self.is_held: Callable[[], bool] = lambda: False  # asked before anything is sent to engines
        self._advancing: asyncio.Task[None] | None = None

    # --- what the trainer asks for ---

    async def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Read the journal, and begin before ``first_step``; ``state``: that of the checkpoint before it."""
        for damage in await asyncio.to_thread(self._journal.replay, self._state.apply):  # gigabytes of it
            self._report("journal_damaged", detail=damage)
        if not self._state.is_known and state:
            self._state.apply(Record("state", state, {}))
            self._report("journal_missing", detail=f"{self._folder}: what was in the making is lost")
        self._journal.begin(self._state.state())
        missing = await asyncio.to_thread(self._steps.missing, self._state, first_step)
        if missing:  # or the next process would count their groups once more
            await asyncio.to_thread(self._journal.commit, missing)
        for record in missing:
            self._state.apply(record)
        self._admission.reached, self._next_number = first_step - 1, self._state.next_number
        for group in self._state.open.values():
            self._go_on(group)
        self._advancing = asyncio.create_task(self._run())

    @property
    def wants_weights(self) -> bool:
        """Engines are lost that only the trainer can bring back."""
        return self._pool.wants_weights

    async def next_batch(self, step: int, wait_s: float) -> Path | None:
        """The file with the groups of ``step``; None if they do not exist after ``wait_s`` seconds.

        EnginesGone if no engine has worked for too long. Raises what the sampler's loop has raised.
        """
        path = step_path(self._folder, step)
        if step <= self._state.served:
            if self._steps.is_readable(step):
                self._admission.reached = max(self._admission.reached, step)
                return path
            self._news.append(records.rewound(step - 1))
        self._admission.reached = step - 1
        self._drop_stale(list(self._state.finished.values()), step)
        self._changed.set()
        try:
            async with asyncio.timeout(wait_s), self._advanced:
                await self._advanced.wait_for(lambda: self._failure or self._chosen(step) is not None)
        except TimeoutError:
            self.check_engines()
            return None
        if self._failure:
            raise self._failure
        await self._give(step)
        return path

    def check_engines(self) -> None:
        """EnginesGone if none has worked for too long."""
        self._pool.check(self._rollout.engine_config.lost_minutes)

    async def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Bring weights, which the updates of ``step`` have made, to every engine that works."""
        self.weights_are_coming(version)
        await self._pool.update(folder, version)
        self.weights_came(version, step)

    def weights_are_coming(self, version: int) -> None:
        """Tokens of ``version`` are no lie from now on."""
        self._dispatcher.coming = version

    def weights_came(self, version: int, step: int) -> None:
        """Every engine that works has them."""
        self._news.append(records.weights_came(version, step))
        self._changed.set()

    def state(self) -> dict[str, Any]:
        """What a continuation needs if the journal is lost: the place in the dataset, and the counts."""
        return self._state.state().fields

    async def checkpointed(self, oldest: int) -> None:
        """Begin a new file of the journal; delete what no continuation after step ``oldest`` needs."""
        if (keep := self._rollout.keep_steps) is not None:
            await asyncio.to_thread(self._steps.delete, min(oldest, self._state.served - keep))
        async with self._advanced:
            self._journal.begin(self._state.state())
            self._journal.collect([*self._state.open, *self._state.finished])

    async def close(self) -> None:
        """Stop; what engines have in hand is kept as far as it has come, but in ``rounds``: a round that goes
        on from half of its tokens ends in other bits than a whole one."""
        self._closing, self._admission.is_open = True, False
        if self._advancing is not None and not self._failure:
            if not self._rounds:
                await self._pool.abort()
                await self._dispatcher.drain(_DRAIN_S)
            async with self._advanced:
                await self._commit()
            self._advancing.cancel()
        self._dispatcher.cancel()
        for task in self._scoring.values():
            task.cancel()
        self._journal.close()

    # --- the loop ---

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._advanced:
                try:
                    if self._failure:
                        return
                    await self._advance()
                except Exception as error:  # the trainer is told when it asks for its next batch
                    self._failure = error
                    return
                finally:
                    self._advanced.notify_all()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """A group that cannot be judged ends the sampler: the trainer is told, and starts another."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failure = error
            self._changed.set()

    async def _advance(self) -> None:
        await self._commit()
        for group in self._whole:
            self._scoring[group.number] = task = asyncio.create_task(self._judge_group(group))
            task.add_done_callback(self._note_failure)
        self._whole.clear()
        if self.is_held():
            return
        self._begin_groups()
        while self._news or self._dispatcher.has_arrived:  # nothing is sent for a group that is to be dropped
            await self._commit()
        await self._dispatcher.send(at_once=self._rounds)

    async def _commit(self) -> None:
        """Write everything that is new to the journal, then take note of it."""
        parts = [
            part
            for part in self._dispatcher.take_arrived()
            if self._state.open.get(part.group.number) is part.group  # else it was dropped meanwhile
        ]
        news, self._news = self._news, []
        if parts:
            news.insert(0, records.segments(parts))
        if not news:
            return
        if self._journal.is_full:
            self._journal.begin(self._state.state())
        await asyncio.to_thread(self._journal.commit, news)
        for record in news:
            self._state.apply(record)
            if record.kind == "dropped":
                self._dispatcher.forget(record.fields["number"])
                self._dropping.discard(record.fields["number"])
            elif record.kind == "open":
                for number, _, _ in record.fields["groups"]:
                    self._go_on(self._state.open[number])
        for part in parts:
            self._dispatcher.add(part.group, part.sample)
        for group in {part.group.number: part.group for part in parts}.values():
            if group.is_whole and group.number in self._state.open:
                self._whole.append(group)
        if any(record.kind == "weights" for record in news):
            self._drop_stale(list(self._state.open.values()), self._state.weights_step + 1)
            self._dispatcher.unpark()
            self._admission.is_open = not self._closing

    def _go_on(self, group: OpenGroup) -> None:
        """A group that has begun, or that the journal has brought back."""
        if group.is_whole:
            self._whole.append(group)
        for sample in range(len(group.responses)):
            self._dispatcher.add(group, sample)

    async def _judge_group(self, group: OpenGroup) -> None:
        prompt = self._dataset.prompts[group.index]
        ids = [response.arrays()[0] for response in group.responses]
        texts = await asyncio.to_thread(self._dataset.texts, ids)  # it takes a while for long responses
        found = await asyncio.gather(
            *(self._scorer.score(prompt, text, len(one)) for text, one in zip(texts, ids, strict=True))
        )
        rewards = [one.reward for one in found]
        failures = [one.failure for one in found if one.failure]
        self._news.append(records.judged(group.number, rewards, failures))
        del self._scoring[group.number]
        if self._rollout.drop_uniform_groups and is_uniform(rewards):
            self._drop(group, "uniform")
        self._changed.set()

    def _begin_groups(self) -> None:
        if self._rounds and not self._is_time_for_a_round():
            return
        if count := self._admission.room:
            self._open(self._order.take(self._state.taken, count), self._state.taken + count)

    def _is_time_for_a_round(self) -> bool:
        """No other is in the making, and the trainer waits: new weights would come at no certain token."""
        return not self._is_busy and self._admission.reached == self._state.weights_step

    def _open(self, places: Sequence[tuple[int, int]], taken: int | None) -> None:
        groups = [(self._next_number + n, epoch, index) for n, (epoch, index) in enumerate(places)]
        self._next_number += len(groups)
        self._news.append(records.opened(groups, taken))

    # --- giving a step its groups ---

    def _chosen(self, step: int) -> list[Finished] | None:
        """The groups of ``step``; None while there are too few and more may come."""
        count, is_last = self._rollout.prompts_per_step, self._is_exhausted()
        if not is_last and (self._rounds or len(self._state.finished) < count):
            return None
        groups = sorted(self._state.finished.items())
        found = [group for _, group in groups if not self._must_go(group, step)]
        return found[:count] if len(found) >= count or is_last else None

    def _is_exhausted(self) -> bool:
        """Nothing more can come before the next weights."""
        return not self._is_busy and self._admission.may_sample and self._admission.room == 0

    @property
    def _is_busy(self) -> bool:
        """Something is being sampled or judged, or waits to be noted."""
        return bool(self._dispatcher.is_busy or self._scoring or self._whole or self._news)

    async def _give(self, step: int) -> None:
        """Write the step's file: from then on its groups belong to it."""
        async with self._advanced:
            await self._commit()
            chosen = self._chosen(step) or []
            numbers = [group.number for group in chosen]
            stale = sum(self._admission.is_stale(group, step) for group in chosen)
            metrics = sampler_metrics(self._state, chosen, stale, self._config.reward)
            metrics["sampler/engines"] = float(self._pool.up)
            batch = StepBatch(tuple(group.group for group in chosen), metrics)
            await asyncio.to_thread(write_step, self._folder, step, batch, numbers)
            self._news.append(records.batched(step, numbers))
            await self._commit()
            self._admission.reached = step
        self._changed.set()
        if self._rollout.max_staleness and not self._rollout.overlap:
            await self._pool.abort()

    def _must_go(self, group: OpenGroup | Finished, step: int) -> bool:
        return self._rollout.on_stale != "train" and self._admission.is_stale(group, step)

    def _drop_stale(self, groups: Sequence[OpenGroup | Finished], step: int) -> None:
        """Drop what is too old for ``step``, and begin its prompts anew if that is wanted."""
        for group in groups:
            if self._must_go(group, step) and self._drop(group, "stale"):
                place = (group.epoch, group.index)
                if self._rollout.on_stale == "resample" and self._resampled[place] < MOST_RESAMPLES:
                    self._resampled[place] += 1
                    self._open([place], None)

    def _refuse(self, group: OpenGroup, why: str) -> None:
        self._report("request_refused", detail=why)
        self._drop(group, "refused")

    def _drop(self, group: OpenGroup | Finished, reason: str) -> bool:
        """Whether this is news: the book has the group until the record of its drop is there."""
        if group.number in self._dropping:
            return False
        self._dropping.add(group.number)
        self._news.append(records.dropped(group.number, reason))
        self._whole = [one for one in self._whole if one is not group]
        self._dispatcher.forget(group.number)
        if task := self._scoring.pop(group.number, None):
            task.cancel()
        self._changed.set()
        return True
