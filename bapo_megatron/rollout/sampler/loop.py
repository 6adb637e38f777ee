"""The sampler's loop: it commits events to the write-ahead log, applies them, and acts on the new state.

One task advances whenever something has happened. It writes all events that wait, and the segments that
engines returned, in one commit, and only then applies them; it opens new groups as ``admission.py`` allows,
and sends requests to engines (``dispatcher.py``). Complete groups are scored (``scoring.py``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from bapo_megatron.algo.filters import is_uniform
from bapo_megatron.config import RolloutConfig
from bapo_megatron.data.mixture import Mixture
from bapo_megatron.data.prompts import PromptOrder
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.sampler.admission import AdmissionController
from bapo_megatron.rollout.sampler.dispatcher import Dispatcher
from bapo_megatron.rollout.sampler.event_log.events import (
    group_dropped,
    group_scored,
    groups_opened,
    segments_arrived,
)
from bapo_megatron.rollout.sampler.event_log.journal import SegmentJournal
from bapo_megatron.rollout.sampler.event_log.state import FinishedGroup, OpenGroup, SamplerState
from bapo_megatron.rollout.sampler.event_log.write_ahead_log import Record
from bapo_megatron.rollout.sampler.scoring import FirstStepScores, GroupScorer

MAX_RESAMPLES = 3
"""Times that a prompt is sampled once more because its group was stale, before it is given up."""

_DRAIN_S = 5.0
"""The longest wait, at the end of a run, for the tokens of requests in flight."""


class SamplerLoop:
    """Advances the event-sourced state. Events wait in a queue; a commit writes and applies all of them."""

    def __init__(
        self,
        config: RolloutConfig,
        order: PromptOrder | Mixture,
        sampler_state: SamplerState,
        journal: SegmentJournal,
        admission: AdmissionController,
        dispatcher: Dispatcher,
        scorer: GroupScorer,
        changed: asyncio.Event,
        report: Report,
        rounds: bool,
        is_held: Callable[[], bool],
    ) -> None:
        """``changed``: wakes the loop; the engine pool sets it, too. ``rounds``, ``is_held``: see
        ``GroupSampler``."""
        self._config, self._order, self._state, self._journal = config, order, sampler_state, journal
        self._admission, self._dispatcher, self._scorer = admission, dispatcher, scorer
        self._changed, self._report, self._rounds, self._is_held = changed, report, rounds, is_held
        self._events: list[Record] = []
        """Events that wait for their commit."""
        self._next_number = 0
        self._first_scores = FirstStepScores(config.prompts_per_step)
        self._scoring: dict[int, asyncio.Task[None]] = {}
        self._dropping: set[int] = set()
        """Numbers of groups whose drop waits for its commit."""
        self._resampled: Counter[tuple[int, int]] = Counter()
        """Times that each (epoch, index) was sampled once more."""
        self._advanced = asyncio.Condition()
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    # --- for the sampler ---

    def start(self) -> None:
        """Resume the open groups, and advance from now on."""
        self._next_number = self._state.next_number
        self._first_scores.begin(self._state)
        for group in self._state.open.values():
            self._resume(group)
        self._task = asyncio.create_task(self._run())

    def post(self, event: Record) -> None:
        """Queue an event for the next commit."""
        self._events.append(event)
        self._changed.set()

    async def wait_for(self, condition: Callable[[], bool], wait_s: float) -> bool:
        """Whether ``condition`` holds within ``wait_s`` seconds. Raises the error that has ended the loop."""
        self._changed.set()
        try:
            async with asyncio.timeout(wait_s), self._advanced:
                await self._advanced.wait_for(lambda: self._error or condition())
        except TimeoutError:
            return False
        if self._error:
            raise self._error
        return True

    @asynccontextmanager
    async def between_commits(self) -> AsyncIterator[None]:
        """Commit, hold the loop while the block runs, and commit what the block has posted."""
        async with self._advanced:
            await self._commit()
            yield
            await self._commit()
        self._changed.set()

    async def close(self) -> None:
        """Stop, and keep the tokens of requests in flight.

        In ``rounds`` they are not kept: a round that continues from half of its tokens ends in other bits.
        """
        if self._task is not None and not self._error:
            async with self.between_commits():
                self._task.cancel()  # nothing more is opened or requested
                if not self._rounds:
                    await self._dispatcher.drain(_DRAIN_S)
        self._dispatcher.cancel()
        for task in self._scoring.values():
            task.cancel()

    @property
    def is_exhausted(self) -> bool:
        """Whether no group can be finished or opened before the next weights."""
        return not self._is_busy and self._admission.may_sample and self._admission.room == 0

    def drop_stale(self, groups: Iterable[OpenGroup | FinishedGroup], step: int) -> None:
        """Drop groups that are too old for ``step``, and resample their prompts if ``on_stale`` says so."""
        for group in list(groups):
            if self._admission.must_drop(group, step) and self._drop(group, "stale"):
                place = (group.epoch, group.index)
                if self._config.on_stale == "resample" and self._resampled[place] < MAX_RESAMPLES:
                    self._resampled[place] += 1
                    self._open_groups([place], None)

    # --- advancing ---

    async def _run(self) -> None:
        while not self._error:
            await self._changed.wait()
            self._changed.clear()
            async with self._advanced:
                try:
                    if not self._error:
                        await self._advance()
                except Exception as error:  # raised again when the trainer asks for its next batch
                    self._error = error
                finally:
                    self._advanced.notify_all()

    async def _advance(self) -> None:
        await self._commit()
        if self._is_held():
            return
        self._admit_groups()
        while self._events or self._dispatcher.has_results:  # request nothing for a dropped group
            await self._commit()
        await self._dispatcher.send(at_once=self._rounds)

    @property
    def _is_busy(self) -> bool:
        """Whether something is sampled, scored, or waits for its commit."""
        return bool(self._dispatcher.is_busy or self._scoring or self._events)

    async def _commit(self) -> None:
        """Write everything that is new in one commit, then apply it and act on it."""
        arrived, refusals = self._dispatcher.take_results()
        for group, why in refusals:
            if self._is_open(group) and self._drop(group, "refused"):
                self._report("request_refused", detail=why)
        segments = [one for one in arrived if self._is_open(one.group)]
        events, self._events = self._events, []
        if segments:
            events.insert(0, segments_arrived(segments))
        if not events:
            return
        if self._journal.is_full:
            self._journal.rotate(self._state.snapshot())
        await asyncio.to_thread(self._journal.commit, events)
        for event in events:
            self._state.apply(event)
            self._act_on(event)
        for segment in segments:
            self._dispatcher.add(segment.group, segment.sample)
        for group in {one.group.number: one.group for one in segments}.values():
            self._score_if_complete(group)
        if any(event.kind == "weights" for event in events):
            self.drop_stale(self._state.open.values(), self._state.weights_step + 1)
            self._dispatcher.unpark()
            self._admission.open()

    def _act_on(self, event: Record) -> None:
        """Begin what a new group asks for, and end what a dropped one has left."""
        if event.kind == "dropped":
            self._cancel(event.fields["number"])
            self._dropping.discard(event.fields["number"])
        elif event.kind == "open":
            for number, _, _ in event.fields["groups"]:
                self._resume(self._state.open[number])

    def _is_open(self, group: OpenGroup) -> bool:
        """Whether the group is still open: it may have been dropped while a request was in flight."""
        return self._state.open.get(group.number) is group

    # --- groups: opened, resumed, scored, dropped ---

    def _admit_groups(self) -> None:
        """Open as many groups as there is room for.

        In ``rounds`` only if no other is open, and the trainer waits: or new weights would come at any token.
        """
        if self._rounds and (self._is_busy or not self._admission.trainer_waits):
            return
        if count := self._admission.room:
            self._open_groups(self._order.take(self._state.taken, count), self._state.taken + count)

    def _open_groups(self, places: Sequence[tuple[int, int]], taken: int | None) -> None:
        groups = [(self._next_number + n, epoch, index) for n, (epoch, index) in enumerate(places)]
        self._next_number += len(groups)
        self.post(groups_opened(groups, taken))

    def _resume(self, group: OpenGroup) -> None:
        """Sample what a group lacks, which is new or comes from the journal; score it if it lacks nothing."""
        for sample in range(len(group.responses)):
            self._dispatcher.add(group, sample)
        self._score_if_complete(group)

    def _score_if_complete(self, group: OpenGroup) -> None:
        """Begin to score a group when all of its responses are finished."""
        if group.is_complete and self._is_open(group):
            self._scoring[group.number] = task = asyncio.create_task(self._score(group))
            task.add_done_callback(self._note_error)

    async def _score(self, group: OpenGroup) -> None:
        results = await self._scorer.score(group)
        del self._scoring[group.number]
        for scored, found in self._first_scores.passed(group, results):
            rewards = [one.reward for one in found]
            self.post(group_scored(scored.number, rewards, [one.failure for one in found if one.failure]))
            if self._config.drop_uniform_groups and is_uniform(rewards):
                self._drop(scored, "uniform")

    def _note_error(self, task: asyncio.Task[None]) -> None:
        """End the loop if a group could not be scored: the next question of the trainer raises the error."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._error = error
            self._changed.set()

    def _drop(self, group: OpenGroup | FinishedGroup, reason: str) -> bool:
        """Queue the drop of a group, which stays in the state until its commit; False if it is queued."""
        if group.number in self._dropping:
            return False
        self._dropping.add(group.number)
        self._cancel(group.number)
        self.post(group_dropped(group.number, reason))
        return True

    def _cancel(self, number: int) -> None:
        """Cancel the requests and the scoring of a group."""
        self._dispatcher.cancel_group(number)
        if task := self._scoring.pop(number, None):
            task.cancel()
