"""Responses on their way to engines and back, one segment at a time."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np

from bapo_megatron.config import RunConfig
from bapo_megatron.rollout.engines.pool import EngineLost, EnginePool, EngineSlot
from bapo_megatron.rollout.engines.requests import Dataset, request_seed
from bapo_megatron.rollout.sampler.admission import AdmissionController
from bapo_megatron.rollout.sampler.events import Part
from bapo_megatron.rollout.sampler.state import OpenGroup, SamplerState
from bapo_megatron.types import FinishReason, GenerateRequest, Generation, SamplingParams

Key = tuple[int, int]
"""Number of the group, and of the response in it."""

_FEW = 128
"""Requests to servers that are sent before what has come from others is looked at again."""

_MOST_LOSSES = 20
"""A response may be what ends its engines; after so many it is given up, with its group."""


class Dispatcher:
    """Sends what may be sampled to engines with room, the oldest groups first, and collects the answers."""

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
        self._ready: list[Key] = []
        """A heap."""
        self._parked: list[Key] = []
        """Responses that have spent their budget under the present weights."""
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._arrived: list[Part] = []
        self._losses: Counter[Key] = Counter()
        """How often an engine was lost with the response."""
        self.coming: int | None = None
        """A version of the weights that is on its way to the engines."""
        self.refuse: Callable[[OpenGroup, str], None] = lambda _group, _why: None
        """Called with a group that no engine can be asked for."""

    @property
    def is_busy(self) -> bool:
        """Something is at an engine, has just come from one, or waits to be sent."""
        return bool(self._running or self._arrived or self._ready)

    def add(self, group: OpenGroup, sample: int) -> None:
        """A response goes on, if it is not whole."""
        if self._state.open.get(group.number) is group and not group.responses[sample].finish_reason:
            heapq.heappush(self._ready, (group.number, sample))

    def unpark(self) -> None:
        """New weights, new budgets."""
        for key in self._parked:
            heapq.heappush(self._ready, key)
        self._parked.clear()

    @property
    def has_arrived(self) -> bool:
        """Something has come that was not taken yet."""
        return bool(self._arrived)

    def take_arrived(self) -> list[Part]:
        """The segments that came since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def forget(self, number: int) -> None:
        """Let go of what is in flight for a group."""
        for sample in range(self._config.rollout.group_size):
            self._losses.pop((number, sample), None)
            if task := self._running.pop((number, sample), None):
                task.cancel()

    async def send(self, at_once: bool) -> None:
        """Fill the engines: ``at_once``, or with some requests, and with more when others had their turn."""
        for sent in count(1):
            if not self._send_one():
                return
            if sent == _FEW and not at_once:
                self._pool.changed.set()
                await asyncio.sleep(0)
                return

    def _send_one(self) -> bool:
        """The first that may go, if an engine has room."""
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
            slot = self._pool.reserve()
            if slot is None:
                return False
            heapq.heappop(self._ready)
            self._running[key] = task = asyncio.create_task(self._sample(slot, group, key, tokens))
            task.add_done_callback(partial(self._release, slot))
            return True
        return False

    def _release(self, slot: EngineSlot, _task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        slot.load -= 1
        self._pool.changed.set()

    async def drain(self, limit_s: float) -> None:
        """Wait until what is in flight has come back, but not for longer than ``limit_s``."""
        if self._running:
            await asyncio.wait(self._running.values(), timeout=limit_s)

    def cancel(self) -> None:
        """Give everything up."""
        for task in self._running.values():
            task.cancel()

    async def _sample(self, slot: EngineSlot, group: OpenGroup, key: Key, tokens: int) -> None:
        """One segment of one response."""
        request = self._request(group, key[1], tokens)
        try:
            answer = await self._pool.generate(slot, request)
            if self._is_sound(slot, answer) and len(answer.token_ids_R):
                whole = self._finish_reason(answer, request)
                self._arrived.append(Part(group, key[1], request.prefix_tokens, answer, whole))
            else:
                self.add(group, key[1])
        except EngineLost as lost:
            if lost.with_this:
                self._losses[key] += 1
            if self._losses[key] < _MOST_LOSSES:
                self.add(group, key[1])
            else:
                self.refuse(group, f"{_MOST_LOSSES} engines were lost with request {request.request_id!r}")
        except ValueError as error:  # the same request would be refused again
            self.refuse(group, str(error))
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

    def _is_sound(self, slot: EngineSlot, answer: Generation) -> bool:
        """Whether all tokens come from weights that the engines were given. If not, the engine lies."""
        for version in np.unique(answer.versions_R).tolist():
            if version != self.coming and self._state.step_of(version) is None:
                self._pool.lose(slot, f"answers with tokens of weights {version}, which nobody gave it")
                return False
        return True

    def _finish_reason(self, answer: Generation, request: GenerateRequest) -> FinishReason | None:
        """That of the whole response, or None if it goes on."""
        tokens = request.prefix_tokens + len(answer.token_ids_R)
        if len(answer.token_ids_R) and answer.token_ids_R[-1] in self._dataset.stop_token_ids:
            return "stop"  # whatever it says: an abort may meet the last token
        return "length" if tokens >= self._config.rollout.max_response_tokens else None
