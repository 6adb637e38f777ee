"""Endpoint scorer: scores responses by requests to a judge or reward model, and caches scores.

The reward pool calls it in its own event loop. Used by ``reward/pool.py``.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from typing import Any, Protocol

from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import RunStopped
from bapo_megatron.reward.endpoints.api_key import key_of, redacted
from bapo_megatron.reward.endpoints.client import EndpointError, JsonClient
from bapo_megatron.reward.endpoints.llm_judge import LlmJudge
from bapo_megatron.reward.endpoints.question import Question, question_of
from bapo_megatron.reward.endpoints.reward_model import RewardModel
from bapo_megatron.reward.endpoints.settings import LlmJudgeSettings, RewardModelSettings, read_settings
from bapo_megatron.types import Prompt


class Judge(Protocol):
    """Protocol of a judge: makes the request body, and reads the score from the reply; the scorer sends.

    Implemented by ``RewardModel`` and ``LlmJudge``.
    """

    url: str

    def body(self, question: Question) -> dict[str, Any]:
        """Request body."""

    def value(self, answer: Any) -> float:
        """Score in a reply, perhaps not finite. EndpointError if there is none."""


class EndpointScorer:
    """Endpoint scorer of a run, async, in one event loop: ``open``, ``answer`` any number at once, ``close``.

    Equal questions are sent once, also while the first one is in flight; failures are not cached. A failed
    call is a reply with a ``failure``, not an exception. Made by ``RewardPool``.
    """

    def __init__(self, reward: RewardConfig) -> None:
        """ConfigError if the settings do not work."""
        settings = read_settings(reward.function, reward.settings)
        self._settings = settings
        self._judge = _judge(settings, reward)
        self._key = key_of(settings.api_key_env)
        self._client = JsonClient(
            self._judge.url, settings.timeout_s, settings.give_up_s, settings.concurrency, self._key
        )
        self._scores: OrderedDict[object, float] = OrderedDict()
        self._under_way: dict[object, asyncio.Task[float]] = {}

    async def open(self) -> None:
        """Wait for the endpoint. RunStopped if nothing is there for ``give_up_s``."""
        try:
            await self._client.connect()
        except EndpointError as error:
            raise RunStopped(
                f"reward.settings.url: no server took a connection for {self._settings.give_up_s:g} s: "
                f"{error}; start it, or correct the address, then give the same command"
            ) from None

    async def answer(self, prompt: Prompt, response: str) -> dict[str, Any]:
        """Reply in a reward worker's form: ``score`` and ``reward``, or ``failure`` with its details."""
        try:
            value = await self._score(question_of(prompt, response, self._settings.thinking))
        except EndpointError as error:
            detail = redacted(str(error), self._key)  # it may quote what the server answered
            return {"failure": "endpoint", "detail": detail, "place": error.place}
        if not math.isfinite(value):
            return {
                "failure": "not finite",
                "detail": f"{self._client.address}: {value}",
                "place": "endpoint",
            }
        return {"score": value, "reward": value}

    async def close(self) -> None:
        """Cancel the calls in flight, and close the connections."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _score(self, question: Question) -> float:
        key = question.digest() if self._settings.cache else object()
        if (known := self._scores.get(key)) is not None:
            self._scores.move_to_end(key)
            return known
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._asked(question))
            task.add_done_callback(lambda done: self._remember(key, done))
        return await asyncio.shield(task)  # others may wait for it when this caller is cancelled

    async def _asked(self, question: Question) -> float:
        return self._judge.value(await self._client.ask(self._judge.body(question)))

    def _remember(self, key: object, done: asyncio.Task[float]) -> None:
        """Cache a score (LRU); failures are not cached."""
        del self._under_way[key]
        if done.cancelled() or done.exception() is not None or not math.isfinite(done.result()):
            return
        self._scores[key] = done.result()
        if len(self._scores) > self._settings.cache:
            self._scores.popitem(last=False)


def _judge(settings: object, reward: RewardConfig) -> Judge:
    if isinstance(settings, LlmJudgeSettings):
        return LlmJudge(settings, reward.wrong, reward.correct)
    assert isinstance(settings, RewardModelSettings)
    return RewardModel(settings)
