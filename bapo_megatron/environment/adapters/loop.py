"""Adapter of a loop: a user's own ``async def play(ask)`` as an environment, a turn of the model an ``ask``.

Durable by replay: a new object runs ``play`` again, and answers its questions from the journal. Only the
standard library is imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from bapo_megatron.environment import Environment, Reply, SampledTurn, Task

Ask = Callable[[str | Sequence[str] | None], Awaitable[SampledTurn]]
"""Ask the model: its next turn, a text, after the observation, one text or several, as ``Reply`` has them.
The first question is the prompt: None, or its text."""


class LoopEnvironment(Environment):
    """An episode that is a loop. Subclass it with ``play``; a worker of environments makes the object."""

    role: ClassVar[Literal["tool", "user"]] = "user"

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self._turns: asyncio.Queue[SampledTurn] = asyncio.Queue()
        self._replies: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        self._playing: asyncio.Task[None] | None = None
        self._is_asking = self._is_closed = False

    async def play(self, ask: Ask) -> float | None:
        """Play the episode: ``await ask(observation)`` is the model's next turn. Its end is the episode's.

        Returns the reward; None: ``reward.function`` judges the last turn. It must ask the same again when it
        is answered the same, or it is begun again after a kill.
        """
        raise NotImplementedError

    async def step(self, turn: str) -> Reply:
        """Answer ``play`` with a turn; what it asks next is the observation."""
        if self._playing is None:
            self._playing = asyncio.create_task(self._play())
            self._check_opening(await self._next())
        self._turns.put_nowait(turn if isinstance(turn, SampledTurn) else SampledTurn(turn))
        return await self._next()

    def close(self) -> None:
        self._is_closed = True
        if self._playing is not None:
            self._playing.cancel()

    async def _ask(self, observation: str | Sequence[str] | None) -> SampledTurn:
        if self._is_asking:  # each would get the turn that answers another
            raise RuntimeError(
                "play() asks while its last question has no answer, or was given up: an episode is one "
                "conversation, so await each ask() before the next, and never cancel one"
            )
        self._is_asking = True
        self._replies.put_nowait(Reply(observation or ""))
        turn = await self._turns.get()
        self._is_asking = False
        return turn

    async def _play(self) -> None:
        try:
            self._replies.put_nowait(Reply(None, reward=await self.play(self._ask)))
        except Exception as error:  # the step that waits raises it
            self._replies.put_nowait(error)
        except BaseException as error:  # sys.exit() in a task would end the worker, with all that it holds
            if self._is_closed:
                raise
            self._replies.put_nowait(_ended(error))

    async def _next(self) -> Reply:
        found = await self._replies.get()
        if isinstance(found, Exception):
            raise found
        return found

    def _check_opening(self, first: Reply) -> None:
        """ValueError if the loop's first question is not what the model was asked: it would learn to answer
        another one."""
        prompt = str(self.task.messages[-1]["content"])
        if first.observation is None:
            raise ValueError("play() ended before it asked the model: it must ask at least once")
        if first.observation not in ("", prompt):
            raise ValueError(
                f"play() asks first {first.observation[:200]!r}, and the prompt's last message is "
                f"{prompt[:200]!r}: ask(None), or put into the dataset's prompts what the loop asks"
            )


def _ended(error: BaseException) -> RuntimeError:
    """What a step raises for a ``play`` that left with ``error``, no Exception."""
    ended = RuntimeError(f"play() ended with {error!r}")
    ended.__cause__ = error
    return ended
