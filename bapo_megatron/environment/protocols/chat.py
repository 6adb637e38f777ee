"""Common form of agent programs' requests and replies, and ``Protocol``, its translation for one HTTP API.

The model endpoint (``server.py``) serves several HTTP APIs, each described by a ``Protocol``: ``read`` parses
a request body into a ``ChatRequest``, and ``whole`` or ``events`` format an ``Answered``, which ``answered``
makes of the policy's turn, as the reply. Also has helpers of the APIs. Imports only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bapo_megatron.environment import SampledTurn
from bapo_megatron.environment.tools.calls import tool_calls, without_calls


class Refused(Exception):
    """Raised to refuse a program's request: HTTP ``status``, and the reason as its text."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class ChatRequest:
    """A parsed request of an agent program: messages and tools in OpenAI's chat completions format."""

    messages: list[Any]
    tools: list[Any] = field(default_factory=list)
    takes_calls: bool = True
    """Whether calls in the turn are returned as calls; otherwise they stay text (`tool_choice` = `none`)."""


class ToolUse(NamedTuple):
    """A tool call in the policy's turn, for the program to execute."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Answered:
    """The policy's turn for the reply, from ``answered``: id, text without calls, tool calls, tokens."""

    name: str
    """Unique for each turn, since programs store answers and calls by id; stable across replays."""
    turn: SampledTurn
    text: str
    calls: Sequence[ToolUse]

    @property
    def completion_tokens(self) -> int:
        return len(self.turn.tokens)

    @property
    def log_probs(self) -> list[dict[str, Any]]:
        """Sampled tokens with log-probs in OpenAI's format; ``bytes`` is None for part of a character."""
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
    """Return the policy's turn as text and calls, for the reply. Malformed calls stay in the text."""
    parsed = tool_calls(turn, request.tools) if request.takes_calls else []
    called = [call for call in parsed if call.problem is None]
    calls = [ToolUse(f"{name}_{place}", call.name, call.arguments) for place, call in enumerate(called)]
    return Answered(name, turn, without_calls(turn) if calls else str(turn), calls)


@dataclass(frozen=True)
class Protocol:
    """One HTTP API of the endpoint: its path, and functions that parse a JSON request body, format the whole
    or streamed reply (server-sent events), and format errors."""

    path: str
    read: Callable[[dict[str, Any]], ChatRequest]
    """Parses a request body. Raises Refused."""
    whole: Callable[[Answered, dict[str, Any]], dict[str, Any]]
    """Formats the reply to a body without streaming."""
    events: Callable[[Answered, dict[str, Any]], Iterator[bytes]]
    """Formats the reply to a streaming body as events."""
    error: Callable[[Refused], dict[str, Any]]
    ping: bytes
    """Sent in a stream while the model answers."""


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{head}data: {text}\n\n".encode()


def refuse_others(body: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise Refused if a field has none of its values in ``fields``: others change the reply's form."""
    for name, allowed in fields.items():
        if body.get(name) not in allowed:
            raise Refused(400, f"{name}={body[name]!r} is not offered here: leave it out")


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list field, empty if missing. Raises Refused for other types."""
    items = body.get(name) or []
    if not isinstance(items, list):
        raise Refused(400, f"{name} is not a list")
    return items


def text_of(place: str, content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return a content's text, from text or a list of parts of types ``kinds``. Raises Refused for others."""
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
    """Return a tool in OpenAI's chat completions format. Raises Refused without a name."""
    if not isinstance(name, str):
        raise Refused(400, "it has a tool without a name")
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}
