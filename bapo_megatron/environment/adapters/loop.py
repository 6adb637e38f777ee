"""Base class of environments written as a coroutine: ``async def play(self, ask)``; each ``ask`` is a turn.

Subclass ``LoopEnvironment`` and define ``play``: it awaits ``ask(observation)`` for the model's next turn,
and returns the reward. After a kill a new object runs ``play`` again and answers its questions with the
journal's turns, so ``play`` must ask the same questions, in any order. Imports only the standard library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bapo_megatron.environment import Environment, Reply, SampledTurn, Task

Ask = Callable[[str | Sequence[str] | None], Awaitable[SampledTurn]]
"""Function that takes an observation, one text or several as in ``Reply``, and returns the model's next turn.
The first observation must be the prompt: None, or its text."""


OTHER_S = 10.0
"""Seconds that a replay waits for the journal's question while the loop asks only others."""


class Question(NamedTuple):
    """Question of ``play`` that waits for the model."""

    reply: Callable[[int], Reply]
    """Returns the question as a reply, given the number of model turns so far."""
    answer: asyncio.Future[tuple[int, SampledTurn]]
    """Number of the answering turn, counted from 1, and the turn."""


class LoopEnvironment(Environment):
    """Base class of environments in the form of a coroutine: define ``play``. ``step`` converts its questions
    into observations, and the model's turns into answers; the end of ``play`` ends the episode."""

    role = "user"

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self._waiting: list[Question] = []
        self._asked: Question | None = None
        self._turns = 0
        self._end: Reply | Exception | None = None
        self._changed = asyncio.Event()
        self._playing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def play(self, ask: Ask) -> float | None:
        """Play the episode: ``await ask(observation)`` returns the model's next turn. Returning ends the
        episode, with the reward, or None for ``reward.function`` to judge the last turn. Questions that are
        asked at the same time are turns of one conversation, in their order. For equal answers it must ask
        equal questions, or the response starts over after a kill."""
        raise NotImplementedError

    async def step(self, turn: str) -> Reply:
        """Answer ``play`` with a turn; its next question is the observation."""
        return await self._stepped(turn, None)

    async def again(self, turn: str, given: str) -> Reply:
        """Repeat ``step`` in a replay: the next question is the recorded one, even if others come first."""
        return await self._stepped(turn, given)

    async def question(self, reply: Callable[[int], Reply]) -> tuple[int, SampledTurn]:
        """Ask the model. Returns the number of its turn, and the turn. Several questions may wait and are
        asked in order; one that is cancelled before its turn is not asked."""
        asked = Question(reply, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._changed.set()
        try:
            return await asked.answer
        finally:
            if asked in self._waiting:
                self._waiting.remove(asked)

    def close(self) -> None:
        self._is_closed = True
        if self._playing is not None:
            self._playing.cancel()

    async def _ask(self, observation: str | Sequence[str] | None) -> SampledTurn:
        _, turn = await self.question(lambda _turns: Reply(observation or ""))
        return turn

    async def _play(self) -> None:
        try:
            self._end = Reply(None, reward=await self.play(self._ask))
        except Exception as error:  # the waiting step raises it
            self._end = error
        except BaseException as error:  # sys.exit() in a task would end the worker and all its episodes
            if self._is_closed:
                raise
            self._end = RuntimeError(f"play() ended with {error!r}")
        finally:
            self._changed.set()

    async def _stepped(self, turn: str, given: str | None) -> Reply:
        if self._playing is None:
            self._playing = asyncio.create_task(self._play())
            self._check_opening(await self._next(None))
        self._turns += 1
        assert self._asked is not None, "a loop that is over is asked nothing"
        if not self._asked.answer.done():  # done if the loop cancelled the question
            sampled = turn if isinstance(turn, SampledTurn) else SampledTurn(turn)
            self._asked.answer.set_result((self._turns, sampled))
        return await self._next(given)

    async def _next(self, given: str | None) -> Reply:
        """Return the loop's end or the next question for the model; in a replay the ``given`` one."""
        limit = None
        while True:
            if isinstance(self._end, Exception):
                raise self._end
            if self._end is not None:
                return self._end
            asked = [(request, request.reply(self._turns)) for request in self._waiting]
            matching = [pair for pair in asked if given in (None, pair[1].text)]
            if matching or (asked and limit is not None and limit <= asyncio.get_running_loop().time()):
                self._asked, reply = (matching or asked)[0]
                self._waiting.remove(self._asked)
                return reply
            if asked and limit is None:
                limit = asyncio.get_running_loop().time() + OTHER_S
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(limit):
                    await self._changed.wait()

    def _check_opening(self, first: Reply) -> None:
        """Raise ValueError if the loop's first question differs from the prompt."""
        prompt = str(self.task.messages[-1]["content"])
        if first.observation is None:
            raise ValueError("play() ended before it asked the model: it must ask at least once")
        if first.observation not in ("", prompt):
            asked = first.observation[:200]
            raise ValueError(f"play() asks first {asked!r}, and not the prompt {prompt[:200]!r}: ask(None)")
