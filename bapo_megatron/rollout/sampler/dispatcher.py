"""The dispatcher: the scheduling of generation requests on engines, one segment of a response at a time.

A segment is the answer to one request: at most ``rollout.segment_tokens`` tokens, or the rest of the
response.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from functools import partial
from itertools import count

import numpy as np

from bapo_megatron.config import RunConfig
from bapo_megatron.rollout.engines.pool import EngineLost, EnginePool
from bapo_megatron.rollout.engines.requests import Dataset, request_seed
from bapo_megatron.rollout.engines.slot import CachedPrefix, EngineSlot
from bapo_megatron.rollout.sampler.admission import AdmissionController
from bapo_megatron.rollout.sampler.event_log.events import Segment
from bapo_megatron.rollout.sampler.event_log.state import OpenGroup, SamplerState
from bapo_megatron.types import FinishReason, GenerateRequest, Generation, SamplingParams

ResponseKey = tuple[int, int]
"""The key of a response: the number of its group, and its position in it."""

_BURST = 128
"""Burst size: requests that are sent before results of others are processed."""

_MAX_ENGINE_LOSSES = 20
"""Engines lost with one response after which its group is dropped: its request may be what crashes
them."""


class Dispatcher:
    """The scheduler of requests: sends them to engines with room, oldest group first; collects results.

    In the sampler's event loop: ``SamplerLoop`` adds responses, lets it ``send``, and takes the results,
    which count only when they are in the write-ahead log. A request that fails with its engine is queued
    again; a malformed one, or one that fails with engine after engine, is a refusal of its group. Made by
    ``GroupSampler``.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        sampler_state: SamplerState,
        admission: AdmissionController,
        pool: EnginePool,
    ) -> None:
        self._config, self._dataset = config, dataset
        self._state, self._admission, self._pool = sampler_state, admission, pool
        self._ready: list[ResponseKey] = []
        """A heap of the responses that wait for an engine."""
        self._parked: list[ResponseKey] = []
        """Responses that have used up their token budget under the current weights."""
        self._running: dict[ResponseKey, asyncio.Task[None]] = {}
        self._segments: list[Segment] = []
        self._refusals: list[tuple[OpenGroup, str]] = []
        self._cached: dict[ResponseKey, CachedPrefix] = {}
        """The prefix cache of each unfinished response: the engine of its last segment."""
        self._losses: Counter[ResponseKey] = Counter()
        """Number of engine losses of each response."""
        self._next_version: int | None = None
        """The version of the weights that engines are loading."""

    def expect_weights(self, version: int) -> None:
        """Accept tokens of weight ``version`` from now on: engines begin to load it."""
        self._next_version = version

    @property
    def is_busy(self) -> bool:
        """Whether a request is in flight or waits for an engine, or a result is not taken yet."""
        return bool(self._running or self._ready or self.has_results)

    @property
    def has_results(self) -> bool:
        """Whether there are segments or refusals that are not taken yet."""
        return bool(self._segments or self._refusals)

    def take_results(self) -> tuple[list[Segment], list[tuple[OpenGroup, str]]]:
        """Take the results since the last call: segments, and groups that cannot be sampled, with reasons."""
        results, self._segments, self._refusals = (self._segments, self._refusals), [], []
        return results

    def add(self, group: OpenGroup, sample: int) -> None:
        """Queue a response for its next segment, unless it is complete or its group is dropped."""
        if self._state.open.get(group.number) is group and not group.responses[sample].finish_reason:
            heapq.heappush(self._ready, (group.number, sample))

    def unpark(self) -> None:
        """Queue the parked responses: new weights bring new budgets."""
        for key in self._parked:
            heapq.heappush(self._ready, key)
        self._parked.clear()

    def cancel_group(self, number: int) -> None:
        """Cancel the requests of a group."""
        for sample in range(self._config.rollout.group_size):
            self._losses.pop((number, sample), None)
            self._cached.pop((number, sample), None)
            if task := self._running.pop((number, sample), None):
                task.cancel()

    async def send(self, at_once: bool) -> None:
        """Fill the engines with requests: ``at_once``, or in bursts between which results are processed."""
        for sent in count(1):
            if not self._send_one():
                return
            if sent == _BURST and not at_once:
                self._pool.changed.set()
                await asyncio.sleep(0)
                return

    def _send_one(self) -> bool:
        """Send the first admitted request to an engine with room; returns whether one was sent."""
        while self._ready and self._admission.may_sample:
            key = self._ready[0]
            group = self._state.open.get(key[0])
            if group is None or key in self._running or group.responses[key[1]].finish_reason:
                heapq.heappop(self._ready)
                continue
            tokens = self._admission.allowance(group, key[1])
            if not tokens:
                self._parked.append(heapq.heappop(self._ready))
                continue
            slot = self._pool.reserve(cached=self._cached.get(key))
            if slot is None:
                return False
            heapq.heappop(self._ready)
            self._running[key] = task = asyncio.create_task(self._sample(slot, group, key, tokens))
            # A callback, no `finally` in the task: a task that is cancelled before it begins runs none.
            task.add_done_callback(partial(self._release, slot))
            return True
        return False

    def _release(self, slot: EngineSlot, _task: asyncio.Task[None]) -> None:
        """Free the request's reserved place at its engine."""
        slot.load -= 1
        self._pool.changed.set()

    async def drain(self, limit_s: float) -> None:
        """Abort the requests in flight, and wait at most ``limit_s`` seconds for their tokens."""
        await self._pool.abort()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=limit_s)

    def cancel(self) -> None:
        """Cancel all requests in flight."""
        for task in self._running.values():
            task.cancel()

    async def _sample(self, slot: EngineSlot, group: OpenGroup, key: ResponseKey, tokens: int) -> None:
        """Request one segment of one response; keep the result, or queue the response again."""
        request = self._request(group, key[1], tokens)
        try:
            answer = await self._pool.generate(slot, request)
            if self._has_known_weights(slot, answer) and len(answer.token_ids_R):
                finish_reason = self._finish_reason(answer, request)
                start = request.prefix_tokens
                self._segments.append(Segment(group, key[1], start, answer, finish_reason))
                self._cached.pop(key, None)
                if not finish_reason and (cached := self._pool.cached_at(slot)):
                    self._cached[key] = cached
            else:
                self.add(group, key[1])
        except EngineLost as lost:
            if lost.by_this_request:
                self._losses[key] += 1
            if self._losses[key] < _MAX_ENGINE_LOSSES:
                self.add(group, key[1])
            else:
                why = f"{_MAX_ENGINE_LOSSES} engines were lost with request {request.request_id!r}"
                self._refusals.append((group, why))
        except ValueError as error:  # malformed: any engine would refuse it
            self._refusals.append((group, str(error)))
        finally:
            if self._running.get(key) is asyncio.current_task():
                del self._running[key]

    def _request(self, group: OpenGroup, sample: int, tokens: int) -> GenerateRequest:
        ids = group.responses[sample].arrays()[0]
        seed = request_seed(self._config.seed, group.epoch, group.index, sample)
        params = SamplingParams(self._config.rollout.temperature, tokens, self._dataset.stop_token_ids, seed)
        return GenerateRequest(
            request_id=f"{group.number}-{sample}-{len(ids)}",
            input_ids=np.concatenate([self._dataset.prompts[group.index].token_ids_P, ids]),
            params=params,
            prefix_tokens=len(ids),
        )

    def _has_known_weights(self, slot: EngineSlot, answer: Generation) -> bool:
        """Check that all tokens come from weights that engines were given; quarantine the engine if not."""
        for version in np.unique(answer.versions_R).tolist():
            if version != self._next_version and self._state.step_of(version) is None:
                self._pool.quarantine(slot, f"answers with tokens of unknown weights {version}")
                return False
        return True

    def _finish_reason(self, answer: Generation, request: GenerateRequest) -> FinishReason | None:
        """The finish reason of the whole response; None if it is not complete."""
        tokens = request.prefix_tokens + len(answer.token_ids_R)
        if len(answer.token_ids_R) and answer.token_ids_R[-1] in self._dataset.stop_token_ids:
            return "stop"  # whatever the engine reports: an abort may coincide with the stop token
        return "length" if tokens >= self._config.rollout.max_response_tokens else None
