"""Conversation of an agent program with the policy: the requests of an episode, as questions.

A program keeps the tokens that were sampled, so its requests may only add messages. That each question comes
here once, also where its client asks again, sees the server (``protocols/server.py``). Only the standard
library is imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bapo_megatron.environment import SampledTurn
from bapo_megatron.environment.adapters.loop import Ask
from bapo_megatron.environment.protocols.chat import Refused
from bapo_megatron.environment.tools.calls import results

Said = tuple[str, str]
"""Role and text of a message. An assistant's text is not compared: programs write calls as they like."""

_TURN: Said = ("assistant", "")
_SHOWN = 100
"""Characters of a message that a refusal shows."""


class Conversation:
    """The requests of one episode, as questions to the policy."""

    def __init__(self, prompt: Sequence[Any], role: str, ask: Ask) -> None:
        """``prompt``: messages of the dataset, with which each request begins. ``role``: that of what a
        request may add. ``ask``: asks the policy for its next turn."""
        self._history, self._role, self._ask = said(prompt), role, ask
        self._has_begun = False
        self._asking = asyncio.Lock()
        """Questions that come together wait for each other."""

    async def answer(self, messages: Sequence[Any]) -> SampledTurn:
        """The policy's turn for the messages of a request; Refused if it asks for something else."""
        question = said(messages)
        async with self._asking:
            new = self._new(question)
            self._history, self._has_begun = [*question, _TURN], True
            return await self._ask(new)

    def _new(self, question: list[Said]) -> str | list[str] | None:
        """What the question adds to the conversation, a text for each message; None for the first, which is
        the prompt."""
        new = question[len(self._history) :]
        if problem := _difference(self._history, question):
            raise Refused(
                409,
                f"it rewrites what was said before, or does not begin with the dataset's prompt: {problem}",
            )
        if not self._has_begun:
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
