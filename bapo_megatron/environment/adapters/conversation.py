"""Translation of an agent program's chat requests into the turns of its episode.

A request holds a whole conversation. ``Conversation.answer`` takes its messages and returns the policy's next
turn. Messages that only follow the last turn become an observation. Any other request (a rewritten history, a
second conversation, a concurrent request) becomes a branch of the episode, after the longest earlier
conversation that it repeats. ``protocols/server.py`` handles retries. Imports only the standard library.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bapo_megatron.environment import Context, Reply, SampledTurn
from bapo_megatron.environment.protocols.chat import Refused, text_of
from bapo_megatron.environment.tools.calls import answer_part, results, tool_calls, typed, without_calls

Ask = Callable[[Callable[[int], Reply]], Awaitable[tuple[int, SampledTurn]]]
"""Signature of ``LoopEnvironment.question``."""

FIRST_S = 5.0
"""Seconds that a request waits for the dataset's prompt if it arrives first: programs may send several at a
time. Shorter than ``server.KEEP_ALIVE_S``, after which a refusal has no status."""

_SHOWN = 100

_NO_TOOLS = (
    "make the rows with bapo_megatron.environment.adapters.agent_rows, or set tools_in_prompts in "
    "environment.settings, if the text of the prompts describes them"
)

_SYSTEM_ROLES = ("system", "developer")


class _Spoken:
    """A model turn in the tree of conversations: its number, and the node after it."""

    def __init__(self, number: int, text: str) -> None:
        """``number``: index among the episode's model turns, counted from 1."""
        self.number, self.follows, whole = number, _Place(), _squashed(text)
        self._texts = {whole, _squashed(answer_part(text))}
        self._beside_calls = {"", whole, _squashed(without_calls(text))}
        calls = [call for call in tool_calls(text) if call.problem is None]
        self._calls = [[call.name, _as_text(call.arguments)] for call in calls]

    def is_repeated_by(self, message: Mapping[str, Any]) -> bool:
        """Whether an assistant message is this turn, perhaps without its thoughts or with its calls apart."""
        said, calls = _squashed(message["content"]), _calls_of(message)
        if not calls:
            return said in self._texts
        return calls == self._calls and said in self._beside_calls


@dataclass
class _Place:
    """A node in the tree of conversations: the nodes after each next message, and the model turns."""

    said: dict[str, _Place] = field(default_factory=dict)
    turns: list[_Spoken] = field(default_factory=list)


class _Found(NamedTuple):
    """A request's place in the tree of conversations, and the earlier turns that it repeats."""

    place: _Place
    after: int
    """Last turn that the question repeats with all before it; 0 for none."""
    repeated: int
    """Number of messages up to that turn."""
    messages: list[dict[str, Any]]
    """All messages, with the model's turns as numbers."""


class Conversation:
    """Tree of an episode's conversations. ``answer`` takes a request's messages, asks the policy (``ask``)
    and returns its turn; calls may be concurrent."""

    def __init__(self, prompt: Sequence[Any], role: str, ask: Ask, tools: Sequence[Any] = ()) -> None:
        """``prompt``: the dataset's messages, which the program must send first. ``role``: of observations.
        ``ask``: asks the policy. ``tools``: tools in the prompt."""
        self._prompt, self._role, self._ask, self._tools = read_messages(prompt), role, ask, [*tools]
        self._begun = asyncio.Event()  # the dataset's prompt was asked
        self._roots: dict[str, _Place] = {}
        """Roots of the conversation trees, keyed by their tools as JSON."""
        self._spoken: list[_Spoken] = []

    async def answer(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> SampledTurn:
        """Return the policy's turn for the messages of a request. ``tools``: None for the prompt's tools.
        Waits until the dataset's prompt has been sent, and raises Refused after ``FIRST_S``. Raises Refused
        also for messages that are not text or that end with the assistant's."""
        question, tools = read_messages(messages), self._tools if tools is None else [*tools]
        has_own = tools == self._tools
        if not question or question[-1]["role"] == "assistant":
            raise Refused(400, "it ends with no message for the model to answer")
        if question == self._prompt and has_own:
            self._begun.set()
        try:
            async with asyncio.timeout(FIRST_S):
                await self._begun.wait()
        except TimeoutError:
            if question != self._prompt:
                problem = f"is not the dataset's prompt, but {_shown(question)}"
            else:
                problem = f"has other tools than the prompt: {_NO_TOOLS}"
            raise Refused(409, f"its first request {problem}") from None
        context = self._found(question, tools)

        def reply(turns: int) -> Reply:
            new = context.messages[context.repeated :]
            if has_own and not turns and context.messages == self._prompt:
                return Reply("")
            goes_on = (
                turns and context.after == turns and {message["role"] for message in new} == {self._role}
            )
            if has_own and goes_on:
                return Reply(results([message["content"] for message in new]))
            asked = {"after": context.after, "messages": new, **({} if has_own else {"tools": tools})}
            said = json.dumps(asked, ensure_ascii=False, sort_keys=True)
            shown = tools if tools or self._tools else None
            return Reply(said, context=Context(context.messages, context.after, shown))

        number, turn = await self._ask(reply)
        spoken = _Spoken(number, str(turn))
        context.place.turns.append(spoken)
        self._spoken.append(spoken)
        return turn

    def _found(self, question: list[dict[str, Any]], tools: list[Any]) -> _Found:
        root = self._roots.setdefault(json.dumps(tools, sort_keys=True), _Place())
        place, after, repeated, messages = root, 0, 0, []
        for number, message in enumerate(question):
            turn = self._turn(place, message) if message["role"] == "assistant" else None
            messages.append(message if turn is None else {"role": "assistant", "turn": turn.number})
            if turn is not None and turn in place.turns:
                place, after, repeated = turn.follows, turn.number, number + 1
            else:
                place = place.said.setdefault(json.dumps(message, sort_keys=True), _Place())
        return _Found(place, after, repeated, messages)

    def _turn(self, place: _Place, message: dict[str, Any]) -> _Spoken | None:
        """Return the turn that a message repeats: one of this place's, or, in another history, of all."""
        known = place.turns or self._spoken
        return next((turn for turn in reversed(known) if turn.is_repeated_by(message)), None)


def _shown(question: list[dict[str, Any]]) -> str:
    return f"{len(question)} messages, the first {json.dumps(question[0], ensure_ascii=False)[:_SHOWN]}"


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages in a chat template's format. Raises Refused for content that is not text."""
    result = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(400, f"message {place} is not an object with a role")
        role = "system" if message["role"] in _SYSTEM_ROLES else message["role"]
        read: dict[str, Any] = {"role": role, "content": text_of(f"message {place}", message.get("content"))}
        if role == "assistant" and message.get("tool_calls"):
            read["tool_calls"] = [_call(place, call) for call in message["tool_calls"]]
        result.append(read)
    return result


def _call(place: int, call: Any) -> dict[str, Any]:
    """Return a call of an assistant message with its arguments as an object, without its id."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, f"message {place} has a call without a function's name")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise Refused(400, f"message {place} has a call whose arguments are not JSON") from None
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _calls_of(message: Mapping[str, Any]) -> list[list[str]]:
    functions = [function["function"] for function in message.get("tool_calls", ())]
    return [[function["name"], _as_text(function["arguments"])] for function in functions]


def _as_text(arguments: Any) -> str:
    """Return call arguments as JSON text, in which a value equals its text: tool schemas convert them."""
    if isinstance(arguments, dict):
        arguments = {name: typed(x, "") if isinstance(x, str) else x for name, x in arguments.items()}
    return json.dumps(arguments, sort_keys=True)


def _squashed(text: str) -> str:
    return " ".join(text.split())
