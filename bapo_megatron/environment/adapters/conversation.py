"""Conversation of an agent program with the policy: the requests of an episode, as questions.

A program keeps the tokens that were sampled, so its requests may only add messages; one that its client gave
up, because the connection broke or took longer than its own limit, may be asked again: a turn of the model
takes as long as it takes. Only the standard library is imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bapo_megatron.environment.adapters.loop import Ask
from bapo_megatron.environment.tools.calls import results

TAKE_OVER_S = 5.0
"""Time after which a question that is asked again is a second one: the first client has not gone."""

Said = tuple[str, str]
"""Role and text of a message. An assistant's text is not compared: programs write calls as they like."""

_TURN: Said = ("assistant", "")
_SHOWN = 100
"""Characters of a message that a refusal shows."""


class Refused(Exception):
    """Refusal of a request, with its HTTP status and the reason. Raised by ``Conversation``, its server."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Conversation:
    """The requests of one episode, as questions to the policy."""

    def __init__(self, prompt: Sequence[Any], role: str, ask: Ask) -> None:
        """``prompt``: messages of the dataset, with which each request begins. ``role``: that of what a
        request may add. ``ask``: asks the policy for its next turn."""
        self._history, self._role, self._ask = said(prompt), role, ask
        self._asked: list[Said] | None = None
        """The last question."""
        self._turn: asyncio.Task[str] | None = None
        """The policy's answer to it. It outlives the request: the client may have gone, and ask again."""
        self._is_answered = False
        """Whether a client has got it."""
        self._waits = asyncio.Lock()
        """Held while a client waits for it."""

    async def answer(self, messages: Sequence[Any]) -> str:
        """The policy's turn for the messages of a request; Refused if it asks for something else."""
        question = said(messages)
        is_again = self._turn is not None and question == self._asked
        try:
            async with asyncio.timeout(TAKE_OVER_S if is_again else 0):
                await self._waits.acquire()
        except TimeoutError:
            raise Refused(409, "an episode is one conversation: ask one question at a time") from None
        try:
            if not is_again:
                new = self._new(question)
                self._turn = asyncio.create_task(self._policy(new))
                self._asked, self._history = question, [*question, _TURN]
                self._is_answered = False
            elif self._is_answered:
                raise Refused(409, "it asks the same again, and has the answer: a turn is sampled once")
            assert self._turn is not None
            turn = await asyncio.shield(self._turn)
            self._is_answered = True
            return turn
        finally:
            self._waits.release()

    def close(self) -> None:
        if self._turn is not None:
            self._turn.cancel()

    async def _policy(self, observation: str | list[str] | None) -> str:
        return await self._ask(observation)

    def _new(self, question: list[Said]) -> str | list[str] | None:
        """What the question adds to the conversation, a text for each message; None for the first, which is
        the prompt."""
        if self._turn is not None and not self._turn.done():
            raise Refused(409, "it asks something else while the model answers a question that it gave up")
        new = question[len(self._history) :]
        if problem := _difference(self._history, question):
            raise Refused(
                409,
                f"it rewrites what was said before, or does not begin with the dataset's prompt: {problem}",
            )
        if self._turn is None:
            if new:
                raise Refused(409, f"it begins with more than the dataset's prompt: {_shown(new[0])}")
            return None
        if not new:
            raise Refused(409, "it adds no message to the conversation")
        for message in new:
            if message[0] != self._role:
                raise Refused(
                    409,
                    f"it adds a message that is no {self._role}'s: set `role` in a subclass, or leave out "
                    f"{_shown(message)}",
                )
        return results([text for _, text in new])


def said(messages: Sequence[Any]) -> list[Said]:
    """Role and text of each message; the text of an assistant's is empty. Refused for one that is no text."""
    found = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(400, f"message {place} is no object with a role")
        role = message["role"]
        found.append((role, "" if role == "assistant" else _text(place, message.get("content"))))
    return found


def _text(place: int, content: Any) -> str:
    parts = content or []
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list) or not all(isinstance(one, dict) for one in parts):
        raise Refused(400, f"message {place} has a content that is neither text nor a list of parts")
    texts = [one.get("text") for one in parts]
    if any(one.get("type") != "text" for one in parts) or not all(isinstance(one, str) for one in texts):
        raise Refused(400, f"message {place} has content that is no text")
    return "".join(map(str, texts))


def _difference(old: Sequence[Said], new: Sequence[Said]) -> str:
    """The first message of ``old`` that ``new`` does not have; empty if it begins with all of them."""
    for place, message in enumerate(old):
        if place >= len(new):
            return f"message {place} is missing, {_shown(message)}"
        if new[place] != message:
            return f"message {place} is {_shown(new[place])}, and was {_shown(message)}"
    return ""


def _shown(message: Said) -> str:
    role, text = message
    return "the model's turn" if message == _TURN else f"{role}: {text[:_SHOWN]!r}"
