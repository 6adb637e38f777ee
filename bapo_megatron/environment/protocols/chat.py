"""Requests of agent programs and the model's answers, whichever protocol they came by.

Each protocol reads its requests into a ``ChatRequest``, and writes its answer from an ``Answered``. Only the
standard library is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bapo_megatron.environment import SampledTurn
from bapo_megatron.environment.tools.calls import tool_calls, without_calls

_TOLD: set[str] = set()
"""Fields of which this worker has told."""


class Refused(Exception):
    """Refusal of a request, with its HTTP status and the reason. Raised by protocols, ``Conversation``, the
    server; each protocol has a form for it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class ChatRequest:
    """A request for a turn of the model: messages and tools as OpenAI's chat completions have them."""

    messages: list[Any]
    tools: list[Any] = field(default_factory=list)
    takes_calls: bool = True
    """Whether calls in the turn are calls; else they are its text (`tool_choice` = `none`)."""


class ToolUse(NamedTuple):
    """A call of a tool, for the program."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Answered:
    """A turn of the model for the program, in no protocol's form yet. Made by ``answered``."""

    name: str
    """Another one for each turn, because programs keep answers and calls by their ids, and the same after a
    replay."""
    turn: SampledTurn
    text: str
    """The turn without its calls."""
    calls: Sequence[ToolUse]

    @property
    def completion_tokens(self) -> int:
        return len(self.turn.tokens)

    @property
    def log_probs(self) -> list[dict[str, Any]]:
        """The sampled tokens with their log-probs, as OpenAI has them. A token that is a part of a character
        has no bytes of its own here."""
        return [
            {
                "token": token.text,
                "logprob": token.log_prob,
                "bytes": None if "\ufffd" in token.text else list(token.text.encode()),
                "top_logprobs": [],
            }
            for token in self.turn.tokens
        ]


def answered(name: str, turn: SampledTurn, request: ChatRequest) -> Answered:
    """The model's turn as an answer to ``request``: its text and its calls. A call that cannot be read stays
    in the text."""
    parsed = tool_calls(turn, request.tools) if request.takes_calls else []
    called = [call for call in parsed if call.problem is None]
    calls = [ToolUse(f"{name}_{place}", call.name, call.arguments) for place, call in enumerate(called)]
    return Answered(name, turn, without_calls(turn) if calls else str(turn), calls)


@dataclass(frozen=True)
class Protocol:
    """A protocol of the endpoint: how it reads requests, and writes answers and errors."""

    path: str
    """Path of its requests, behind the server's address."""
    read: Callable[[dict[str, Any]], ChatRequest]
    """The request of a body. Refused."""
    whole: Callable[[Answered, dict[str, Any]], dict[str, Any]]
    """The answer to a body that asks for no stream."""
    events: Callable[[Answered, dict[str, Any]], Iterator[bytes]]
    """The events of the answer to a body that asks for a stream."""
    error: Callable[[Refused], dict[str, Any]]
    error_event: Callable[[Refused], bytes]
    """An error within a stream."""
    ping: bytes
    """What a stream says while the model answers."""


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{head}data: {text}\n\n".encode()


def refuse_others(body: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Refused for a field of ``fields`` that has none of its values: others change the answer's form."""
    for name, allowed in fields.items():
        if body.get(name) not in allowed:
            raise Refused(400, f"{name}={body[name]!r} is not offered here: leave it out")


def tell_unheeded(body: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Tell once of each field of ``fields`` that has none of its values: it binds the model elsewhere."""
    for name, allowed in fields.items():
        if body.get(name) not in allowed and name not in _TOLD:
            _TOLD.add(name)
            print(
                f"environment: the agent's requests have {name}={repr(body[name])[:80]}, which does nothing "
                "here: the run's settings say how its model samples",
                file=sys.stderr,
                flush=True,
            )


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    """A field that is a list, empty if it is left out. Refused."""
    items = body.get(name) or []
    if not isinstance(items, list):
        raise Refused(400, f"{name} is not a list")
    return items


def text_of(place: str, content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content: a text, or a list of parts of the types ``kinds``. Refused for another one."""
    parts = content or []
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise Refused(400, f"{place} has a content that is neither text nor a list of parts")
    texts = [part.get("text") for part in parts]
    if any(part.get("type") not in kinds for part in parts) or not all(
        isinstance(part, str) for part in texts
    ):
        raise Refused(400, f"{place} has content that is not text")
    return "".join(map(str, texts))


def tool_schema(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as OpenAI's chat completions have it. Refused without a name."""
    if not isinstance(name, str):
        raise Refused(400, "it has a tool without a name")
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}
