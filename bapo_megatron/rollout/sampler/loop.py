"""Main loop of the sampler: commits events to the write-ahead log, applies them and acts on them.

``SamplerLoop`` is a task that wakes at every change. It writes all queued events and results in one commit
before applying them. It opens groups as admission allows, sends requests to engines (``dispatcher.py``) and
turns to environments (``stepper.py``), and has complete groups scored (``group_scoring.py``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from bapo_megatron.config import RolloutConfig
from bapo_megatron.data.prompts import Mixture, PromptOrder
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.sampler.dispatcher import AdmissionController, Dispatcher
from bapo_megatron.rollout.sampler.events import (
    answers_given,
    group_dropped,
    groups_opened,
    in_records,
    response_restarted,
    segments_arrived,
)
from bapo_megatron.rollout.sampler.group_scoring import GroupScoring
from bapo_megatron.rollout.sampler.state import FinishedGroup, OpenGroup, SamplerState
from bapo_megatron.rollout.sampler.stepper import Stepper
from bapo_megatron.rollout.sampler.write_ahead_log import Record, SegmentJournal

MAX_RESAMPLES = 3  # resamples of a prompt whose groups become stale; after these the prompt is dropped
_DRAIN_S = 5.0  # maximum wait at the end of a run for the tokens of in-flight requests


class SamplerLoop:
    """Main loop of the sampler, a task from ``start`` to ``close``; meanwhile, other code may write log and
    state only within ``between_commits``. ``post`` queues an event; ``wait_for`` returns whether a condition
    became true in time, or raises the error that ended the loop."""

    def __init__(
        self,
        config: RolloutConfig,
        order: PromptOrder | Mixture,
        sampler_state: SamplerState,
        journal: SegmentJournal,
        admission: AdmissionController,
        dispatcher: Dispatcher,
        scoring: GroupScoring,
        changed: asyncio.Event,
        report: Report,
        rounds: bool,
        is_held: Callable[[], bool],
        stepper: Stepper,
    ) -> None:
        """``changed``: wakes the loop; the engine pool sets it too. ``rounds``, ``is_held``: see
        ``GroupSampler``."""
        self._config, self._order, self._state, self._journal = config, order, sampler_state, journal
        self._admission, self._dispatcher, self._scoring = admission, dispatcher, scoring
        self._changed, self._report, self._rounds, self._is_held = changed, report, rounds, is_held
        self._stepper = stepper
        self._events: list[Record] = []  # events queued for the next commit
        self._next_number = 0
        self._dropping: set[int] = set()  # numbers of groups whose drop is queued
        self._resampled: Counter[tuple[int, int]] = Counter()  # resamples by (epoch, index)
        self._advanced = asyncio.Condition()
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    # --- for the sampler ---

    def start(self) -> None:
        """Drop finished groups without a new teacher's log-probs, resume the open ones and start the loop."""
        self._next_number = self._state.next_number
        for finished in self._scoring.start(self._state, self.post, self._drop, self._end):
            self._drop(finished, "untaught")
        for group in self._state.open.values():
            self._resume(group)
        self._task = asyncio.create_task(self._run())

    def post(self, event: Record) -> None:
        self._events.append(event)
        self._changed.set()

    async def wait_for(self, condition: Callable[[], bool], wait_s: float) -> bool:
        """Return whether ``condition`` is true within ``wait_s`` s. Raises the error that ended the loop."""
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
        """Commit, hold the loop while the block runs, then commit the block's events (critical section)."""
        async with self._advanced:
            await self._commit()
            yield
            await self._commit()
        self._changed.set()

    async def close(self) -> None:
        """Stop and commit the tokens of in-flight requests, except in ``rounds``: continuing a partial round
        would form different batches with different last bits."""
        if self._task is not None and not self._error:
            async with self.between_commits():
                # Before the drain, so that aborted responses are not sent again.
                self._task.cancel()
                if not self._rounds:
                    await self._dispatcher.drain(_DRAIN_S)
        self._dispatcher.cancel()
        self._stepper.cancel()
        self._scoring.close()

    @property
    def is_exhausted(self) -> bool:
        """Whether no group can finish or open before the next weight update."""
        return not self._is_busy and self._admission.may_sample and self._admission.room == 0

    def drop_stale(self, groups: Iterable[OpenGroup | FinishedGroup], step: int) -> None:
        """Drop groups too stale for ``step``, unless ``on_stale`` is ``train``. If it is ``resample``, open
        new groups for their prompts, at most ``MAX_RESAMPLES`` times per prompt."""
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
                except Exception as error:  # raised by the trainer's next call
                    self._end(error)
                finally:
                    self._advanced.notify_all()

    def _end(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def _advance(self) -> None:
        await self._commit()
        if self._is_held():
            return
        self._admit_groups()
        # Commit before sending: a queued event may drop a group, and new groups must be in the journal.
        while self._events or self._has_results:
            await self._commit()
        if self._rounds and self._stepper.is_busy:
            return  # wait for all answers, so that requests always form the same batches
        await self._dispatcher.send(at_once=self._rounds)

    @property
    def _has_results(self) -> bool:
        return self._dispatcher.has_results or self._stepper.has_results

    @property
    def _is_busy(self) -> bool:
        parts = (self._dispatcher, self._stepper, self._scoring)
        return any(part.is_busy for part in parts) or bool(self._events)

    async def _commit(self) -> None:
        """Commit all new events and results together, then apply them and act on them."""
        arrived, refusals = self._dispatcher.take_results()
        for group, why in refusals:
            if self._is_open(group) and self._drop(group, "refused"):
                self._report("request_refused", detail=why)
        answers, restarts = self._stepper.take_results()
        segments = [one for one in arrived if self._is_open(one.group)]
        answers = [one for one in answers if self._is_open(one.group)]
        restarts = [one for one in restarts if self._is_open(one[0])]
        events, self._events = self._events, []
        # Results come first: applied after a queued drop of their group, they would reopen it.
        events[:0] = [
            *(segments_arrived(part) for part in in_records(segments)),
            *([answers_given(answers)] if answers else []),
            *(response_restarted(*one) for one in restarts),
        ]
        if not events:
            return
        # Write ahead: nothing is applied, answered or requested that a kill could undo.
        await asyncio.to_thread(self._write, events)
        for event in events:
            self._state.apply(event)
            self._act_on(event)
        changed = [(one.group, one.sample) for one in segments]
        changed += [(one.group, one.sample) for one in answers]
        changed += [(group, sample) for group, sample, _ in restarts]
        for group, sample in changed:
            self._continue(group, sample)
        for group in {group.number: group for group, _ in changed}.values():
            self._score_if_complete(group)
        if any(event.kind == "weights" for event in events):
            # Staleness and budgets depend on the step of the new weights, which is applied above.
            self.drop_stale(self._state.open.values(), self._state.weights_step + 1)
            self._dispatcher.unpark()
            self._admission.open()

    def _write(self, events: Sequence[Record]) -> None:
        if self._journal.is_full:
            self._journal.rotate(self._state.snapshot())
        self._journal.commit(events)

    def _act_on(self, event: Record) -> None:
        if event.kind == "dropped":
            self._cancel(event.fields["number"])
            self._dropping.discard(event.fields["number"])
        elif event.kind == "open":
            for number, _, _ in event.fields["groups"]:
                self._resume(self._state.open[number])

    def _is_open(self, group: OpenGroup) -> bool:
        return self._state.open.get(group.number) is group

    # --- groups: opened, resumed, dropped ---

    def _admit_groups(self) -> None:
        """Open as many groups as admission allows; in ``rounds`` only if no group is open and the trainer
        waits, because otherwise new weights could arrive during a round."""
        # In rounds, also wait for the trainer's request: its checkpoint comes before it, and a fork from the
        # middle of a round would form different batches with different last bits.
        is_asked = self._admission.trainer_waits and self._admission.is_asked
        if self._rounds and (self._is_busy or not is_asked):
            return
        if count := self._admission.room:
            self._open_groups(self._order.take(self._state.taken, count), self._state.taken + count)

    def _open_groups(self, places: Sequence[tuple[int, int]], taken: int | None) -> None:
        groups = [(self._next_number + n, epoch, index) for n, (epoch, index) in enumerate(places)]
        self._next_number += len(groups)
        self.post(groups_opened(groups, taken))

    def _resume(self, group: OpenGroup) -> None:
        """Queue a group's unfinished responses; score it if it is complete."""
        for sample in range(len(group.responses)):
            self._continue(group, sample)
        self._score_if_complete(group)

    def _continue(self, group: OpenGroup, sample: int) -> None:
        self._dispatcher.add(group, sample)
        self._stepper.add(group, sample)

    def _score_if_complete(self, group: OpenGroup) -> None:
        if group.is_complete and self._is_open(group):
            self._scoring.begin(group)

    def _drop(self, group: OpenGroup | FinishedGroup, reason: str) -> bool:
        """Queue the drop of a group, which the state keeps until the commit; return False if already done."""
        if group.number in self._dropping:
            return False
        self._dropping.add(group.number)
        self._cancel(group.number)
        self.post(group_dropped(group.number, reason))
        return True

    def _cancel(self, number: int) -> None:
        self._dispatcher.cancel_group(number)
        self._stepper.cancel_group(number)
        self._scoring.cancel(number)
