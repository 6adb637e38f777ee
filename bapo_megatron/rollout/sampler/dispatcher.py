"""Scheduling of generation requests: which groups may sample (staleness), and on which engine.

``AdmissionController`` limits how far sampling runs ahead of the trainer (as AReaL, arXiv 2505.24298, does,
which counts samples instead of groups). ``Dispatcher`` sends the requests of admitted groups. An engine
answers each request with one segment: the response's next tokens, at most ``rollout.segment_tokens``.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from functools import partial
from itertools import count

from bapo_megatron.config import RolloutConfig, RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.pool import EngineLost, EnginePool
from bapo_megatron.rollout.engines.pool_state import CachedPrefix, EngineSlot
from bapo_megatron.rollout.engines.requests import Dataset, asked_routes, request_seed
from bapo_megatron.rollout.sampler.events import Segment
from bapo_megatron.rollout.sampler.response import (
    TURN,
    Sampling,
    finish_reason_of,
    given_up,
    most_tokens,
    next_request,
    without_routes,
)
from bapo_megatron.rollout.sampler.state import FinishedGroup, OpenGroup, SamplerState
from bapo_megatron.rollout.sampler.turns import Environments, within
from bapo_megatron.types import Generation

ResponseKey = tuple[int, int]
"""Group number and position in the group."""
_BURST = 128  # requests sent before pending results are processed


class AdmissionController:
    """Admission rules: how many groups may be outstanding and which of them may sample.

        outstanding groups <= (S + 1 + w - p) B      S = max_staleness, B = prompts_per_step

    w: step of the engines' weights; p: last step whose groups the trainer has; outstanding: being sampled or
    scored, or waiting for a step. While the policy trains, p = w + 1 (S B groups); while it waits for groups,
    p = w ((S + 1) B groups). So no group has to wait more than S steps. Nothing samples before ``open``, nor
    during training if S = 0 or without ``rollout.overlap``. After a resume more groups may be outstanding,
    opened under newer weights than the engines hold; then only the oldest within the bound may sample.

    ``room``: how many groups may open now, fewer if more were dropped than ``rollout.max_oversampling``
    replaces. ``newest_sampling``: number of the newest group that may sample.
    """

    def __init__(self, config: RolloutConfig, sampler_state: SamplerState) -> None:
        self._config = config
        self._state = sampler_state
        self._trainer_step = 0  # last step whose groups the trainer has
        self._asked_step = 0
        self._is_open = False

    def open(self) -> None:
        """Admit requests, because this process has loaded weights into the engines. The state cannot show
        this: after a resume from an older checkpoint it may record newer weights."""
        self._is_open = True

    def trainer_has(self, step: int) -> None:
        """Record that the trainer has the groups of ``step`` and of no later step."""
        self._trainer_step = step

    def trainer_asks(self, step: int) -> None:
        self._asked_step = step

    @property
    def is_asked(self) -> bool:
        """Whether the trainer waits for groups that it requested."""
        return self._asked_step > self._trainer_step

    @property
    def trainer_waits(self) -> bool:
        return self._trainer_step == self._state.weights_step

    @property
    def _steps_ahead(self) -> int:
        """Steps that sampling may still run ahead of the weights; negative if it may not sample."""
        trained = max(self._trainer_step, self._state.served)  # `served` is ahead while replaying old steps
        return self._config.max_staleness + self._state.weights_step - trained

    @property
    def may_sample(self) -> bool:
        return self._is_open and (self._config.overlap or self.trainer_waits) and self._steps_ahead >= 0

    @property
    def room(self) -> int:
        if not self.may_sample:
            return 0
        replaced = round((self._config.max_oversampling - 1) * self._config.prompts_per_step, 6)
        dropped = self._state.dropped["uniform"] + self._state.dropped["failed"]
        beyond = max(0, dropped - int(replaced))
        most = (self._steps_ahead + 1) * self._config.prompts_per_step
        return max(0, most - beyond - self._state.outstanding)

    @property
    def newest_sampling(self) -> float:
        """Number of the newest group that may sample: a later one would be too stale. -1: none; inf: all."""
        if not self.may_sample:
            return -1
        most = (self._steps_ahead + 1) * self._config.prompts_per_step
        if self._state.outstanding <= most:
            return math.inf
        return heapq.nsmallest(most, [*self._state.open, *self._state.finished])[-1]

    def budget(self, group: OpenGroup, sample: int) -> int | None:
        """Return the tokens that a response may still get from the current weights; None: unlimited."""
        budget = self._config.budget_tokens
        return None if budget is None else self._state.remaining_budget(group, sample, budget)

    def is_stale(self, group: OpenGroup | FinishedGroup, step: int) -> bool:
        """Return whether the group's lag at ``step`` exceeds ``max_staleness``."""
        return self._state.lag(group.oldest_version, step) > self._config.max_staleness

    def must_drop(self, group: OpenGroup | FinishedGroup, step: int) -> bool:
        """Return whether the group is stale at ``step`` and ``on_stale`` excludes stale groups."""
        return self._config.on_stale != "train" and self.is_stale(group, step)


class Dispatcher:
    """Sender of the sampler's generation requests: ``add`` queues a response, ``send`` requests the queued
    ones' next segments from engines with room, oldest group first; ``take_results`` returns the segments.

    Segments count only once the caller (``SamplerLoop``) has them in the write-ahead log. A request is
    requeued if its engine fails; a malformed one, or one involved in too many engine losses, becomes a
    refusal of its group. A response without remaining token budget is parked until ``unpark``.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        sampler_state: SamplerState,
        admission: AdmissionController,
        pool: EnginePool,
        environments: Environments,
    ) -> None:
        """``environments``: their stop tokens also end a turn."""
        self._dataset, self._group_size = dataset, config.rollout.group_size
        plain = Sampling(
            config.rollout.temperature,
            config.rollout.max_response_tokens,
            config.seed,
            dataset.stop_token_ids,
            config.rollout.segment_tokens,
            asked_routes(config),
        )
        sources = {prompt.source for prompt in dataset.prompts}
        self._samplings = {source: within(plain, environments.get(source)) for source in sources}
        """Sampling parameters by prompt source."""
        self._state, self._admission, self._pool = sampler_state, admission, pool
        self._ready: list[ResponseKey] = []  # heap of responses that wait for an engine
        self._parked: list[ResponseKey] = []  # responses without token budget under the current weights
        self._running: dict[ResponseKey, asyncio.Task[None]] = {}
        self._segments: list[Segment] = []
        self._refusals: list[tuple[OpenGroup, str]] = []
        self._useless: ConfigError | None = None
        """Error of an engine whose answers are unusable; the next ``take_results`` raises it."""
        self._cached: dict[ResponseKey, CachedPrefix] = {}
        """Where each unfinished response's prefix is cached: the engine of its last segment."""
        self._losses: Counter[ResponseKey] = Counter()  # engine losses per response
        self._next_version: int | None = None  # weight version that engines are loading

    def expect_weights(self, version: int) -> None:
        """Accept tokens of weight ``version`` from now on, because engines begin to load it."""
        self._next_version = version

    @property
    def is_busy(self) -> bool:
        """Whether requests are in flight, may be sent under the current weights, or have untaken results."""
        waits = bool(self._ready) and self._ready[0][0] <= self._admission.newest_sampling
        return bool(self._running or waits or self.has_results)

    @property
    def has_results(self) -> bool:
        """Whether there are untaken segments or refusals, or an error."""
        return bool(self._segments or self._refusals or self._useless)

    def take_results(self) -> tuple[list[Segment], list[tuple[OpenGroup, str]]]:
        """Return and clear the pending results: segments, and refused groups with their reasons. Raises
        ConfigError if an engine omits the routes that the run requires."""
        if self._useless:
            raise self._useless
        results, self._segments, self._refusals = (self._segments, self._refusals), [], []
        return results

    def add(self, group: OpenGroup, sample: int) -> None:
        """Queue a response if its group is open and it needs another segment; forget a complete one."""
        if self._state.open.get(group.number) is group and group.responses[sample].is_sampling:
            heapq.heappush(self._ready, (group.number, sample))
        elif group.responses[sample].is_complete:  # possibly by its environment
            self._cached.pop((group.number, sample), None)
            self._losses.pop((group.number, sample), None)

    def unpark(self) -> None:
        """Queue the parked responses, because new weights bring new budgets."""
        for key in self._parked:
            heapq.heappush(self._ready, key)
        self._parked.clear()

    def cancel_group(self, number: int) -> None:
        for sample in range(self._group_size):
            self._losses.pop((number, sample), None)
            self._cached.pop((number, sample), None)
            if task := self._running.pop((number, sample), None):
                task.cancel()

    async def send(self, at_once: bool) -> None:
        """Send requests while engines have room. Unless ``at_once``, stop after ``_BURST`` requests and wake
        the loop, which first processes pending results."""
        newest = self._admission.newest_sampling
        for sent in count(1):
            if not self._send_one(newest):
                return
            if sent == _BURST and not at_once:
                self._pool.changed.set()
                await asyncio.sleep(0)
                return

    def _send_one(self, newest: float) -> bool:
        """Send the first request of a group up to ``newest``; return False if none was sent."""
        while self._ready and self._ready[0][0] <= newest:
            key = self._ready[0]
            group = self._state.open.get(key[0])
            if group is None or key in self._running or not group.responses[key[1]].is_sampling:
                heapq.heappop(self._ready)
                continue
            budget = self._admission.budget(group, key[1])
            most = most_tokens(group.responses[key[1]], self._sampling(group), budget)
            if not most:
                self._parked.append(heapq.heappop(self._ready))
                continue
            slot = self._pool.reserve(cached=self._cached.get(key))
            if slot is None:
                return False
            heapq.heappop(self._ready)
            self._running[key] = task = asyncio.create_task(self._sample(slot, group, key, most))
            # A callback because a task cancelled before it starts runs no `finally`.
            task.add_done_callback(partial(self._release, slot))
            return True
        return False

    def _release(self, slot: EngineSlot, _task: asyncio.Task[None]) -> None:
        slot.load -= 1
        self._pool.changed.set()

    async def drain(self, limit_s: float) -> None:
        """Abort in-flight requests and wait up to ``limit_s`` seconds for their tokens."""
        await self._pool.abort()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=limit_s)

    def cancel(self) -> None:
        for task in self._running.values():
            task.cancel()

    async def _sample(self, slot: EngineSlot, group: OpenGroup, key: ResponseKey, most: int) -> None:
        prompt, sampling = self._dataset.prompts[group.index], self._sampling(group)
        seed = request_seed(sampling.seed, group.epoch, group.index, key[1])
        name = f"{group.number}-{key[1]}"
        request = next_request(group.responses[key[1]], most, sampling, prompt, name, seed)
        try:
            answer = await self._pool.generate(slot, request, self._is_known, "the run's weights")
            if useless := without_routes(answer, request, slot.engine.name):
                self._useless = ConfigError(useless)
                self._pool.changed.set()
            elif len(answer.token_ids_R):
                self._keep(slot, group, key, answer)
            else:
                self.add(group, key[1])
        except EngineLost as lost:
            self._losses[key] += lost.by_this_request
            if why := given_up(self._losses[key], request.request_id):
                self._refusals.append((group, why))
            else:
                self.add(group, key[1])
        except ValueError as error:  # malformed: every engine would refuse it
            self._refusals.append((group, str(error)))
        finally:
            if self._running.get(key) is asyncio.current_task():
                del self._running[key]

    def _keep(self, slot: EngineSlot, group: OpenGroup, key: ResponseKey, answer: Generation) -> None:
        """Queue a segment for the next commit; record its prefix cache if the response continues."""
        response = group.responses[key[1]]
        finish_reason = finish_reason_of(response.branch.tokens, answer, self._sampling(group))
        self._segments.append(Segment(group, key[1], response.tokens, answer, finish_reason))
        self._cached.pop(key, None)
        if finish_reason in (None, TURN) and (cached := self._pool.cached_at(slot)):
            self._cached[key] = cached

    def _sampling(self, group: OpenGroup) -> Sampling:
        return self._samplings[self._dataset.prompts[group.index].source]

    def _is_known(self, version: int) -> bool:
        return version == self._next_version or self._state.step_of(version) is not None
