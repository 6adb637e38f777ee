"""Suite sampler: n responses to every problem, scored and stored as they finish.

The engine pool and the reward pool are those of a training run (``rollout/``, ``reward/``); the caller makes
them. Used by ``run.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import RunStopped
from bapo_megatron.evaluation.scoring import ScoredResponse, vote_of
from bapo_megatron.rollout.engines.pool import EnginePool, EnginesGone
from bapo_megatron.rollout.engines.slot import EngineSlot
from bapo_megatron.rollout.sampler.response import Sampling
from bapo_megatron.rollout.sampler.scoring import Scorer, response_score
from bapo_megatron.rollout.sampler.turns import TurnTaker
from bapo_megatron.rollout.sampler.whole_response import whole_response
from bapo_megatron.runtime.jsonl_log import Row
from bapo_megatron.types import Prompt

Keep = Callable[[Sequence[Row]], None]
"""Stores responses durably; it may block."""

_LOOK_S = 1.0


class SuiteSampler:
    """Sampler of one suite's responses, in one event loop, of a started engine pool and reward pool.

    ``ask`` returns when every response that it was asked for is scored and stored. Made by
    ``evaluation/run.py``, one for each suite.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        pool: EnginePool,
        scorer: Scorer,
        sampling: Sampling,
        version: int,
        lost_minutes: float,
        right_from: float = 1.0,
        turns: TurnTaker | None = None,
        name: str = "",
    ) -> None:
        """``version``: of the weights to sample from; tokens of others are refused. ``lost_minutes``: longest
        wait while no engine answers. ``right_from``: lowest score of a right response. ``turns``: of
        the environment that answers them, if there is one. ``name``: of the suite, part of its episodes'."""
        self._prompts, self._tokenizer = prompts, tokenizer
        self._pool, self._scorer, self._sampling, self._version = pool, scorer, sampling, version
        self._turns, self._name = turns, name
        self._lost_minutes, self._right_from = lost_minutes, right_from
        self._running: set[asyncio.Task[None]] = set()
        self._judged: asyncio.Queue[Row] = asyncio.Queue()
        self._failure: BaseException | None = None

    async def ask(self, places: Iterable[tuple[int, int]], keep: Keep) -> None:
        """Sample a response for every (problem, sample), each given to ``keep`` when it is scored.

        RunStopped if no engine answers for ``lost_minutes``, or one problem kills engine after engine.
        """
        waiting = deque(places)
        storing = asyncio.create_task(self._keep(len(waiting), keep))
        storing.add_done_callback(self._ended)
        try:
            while not storing.done():
                while waiting and (slot := self._pool.reserve()):
                    self._start(slot, *waiting.popleft())
                self._check()
                self._pool.changed.clear()
                changed = asyncio.ensure_future(self._pool.changed.wait())
                await asyncio.wait({changed, storing}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            self._check()
        finally:
            for task in [*self._running, storing]:
                task.cancel()
            await asyncio.gather(*self._running, storing, return_exceptions=True)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._pool.check(self._lost_minutes)
        except EnginesGone as gone:
            raise RunStopped(str(gone)) from gone

    def _start(self, slot: EngineSlot, problem: int, sample: int) -> None:
        task = asyncio.create_task(self._respond(slot, problem, sample))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._pool.changed.set()

    async def _respond(self, slot: EngineSlot, problem: int, sample: int) -> None:
        prompt = self._prompts[problem]
        place = (0, problem, sample)
        name = f"{problem}-{sample}" if self._turns is None else f"{self._name}-{problem}-{sample}"
        response = await whole_response(
            *(self._pool, self._sampling, self._version, prompt, name, place, slot), turns=self._turns
        )
        tokens, reason = response.sampled_tokens, response.finish_reason
        assert reason is not None
        text, last = self._text(response.so_far.token_ids_R), self._text(response.last_turn_R)
        result = await response_score(self._scorer, prompt, response, last, RewardConfig.failed)
        correct = result.score is not None and result.score >= self._right_from
        judged = ScoredResponse(problem, sample, correct, vote_of(last), tokens, reason, result.failure)
        self._judged.put_nowait({**asdict(judged), "text": text})

    def _text(self, ids: np.ndarray) -> str:
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text

    async def _keep(self, count: int, keep: Keep) -> None:
        """Store the scored responses, in batches, until all ``count`` are stored."""
        while count:
            rows = [await self._judged.get()]
            with suppress(asyncio.QueueEmpty):
                while True:
                    rows.append(self._judged.get_nowait())
            await asyncio.to_thread(keep, rows)
            count -= len(rows)
