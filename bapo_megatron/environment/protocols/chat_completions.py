"""Server side of OpenAI's chat completions API, ``POST /v1/chat/completions``, for agent programs.

``CHAT_COMPLETIONS`` is its ``Protocol`` (chat.py): parses a request body into a ``ChatRequest``, and formats
the policy's turn (``Answered``) as a whole or streamed reply, with tool calls and log-probs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from bapo_megatron.environment.protocols.chat import (
    Answered,
    ChatRequest,
    Protocol,
    Refused,
    event,
    list_of,
    refuse_others,
)

_NOT_OFFERED: dict[str, tuple[Any, ...]] = {"n": (None, 1), "top_logprobs": (None, 0)}
"""Request fields that change the reply's form, with the values that do not."""


def _read(body: dict[str, Any]) -> ChatRequest:
    if not isinstance(body.get("messages"), list):
        raise Refused(400, "the request has no list of messages")
    refuse_others(body, _NOT_OFFERED)
    return ChatRequest(body["messages"], list_of(body, "tools"), body.get("tool_choice") != "none")


def _whole(answer: Answered, body: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["tool_calls"] = _calls(answer)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _finish_reason(answer),
        "logprobs": _log_probs(answer, body),
    }
    head = _head(answer, body, "chat.completion")
    return {**head, "choices": [choice], "usage": _usage(answer)}


def _events(answer: Answered, body: dict[str, Any]) -> Iterator[bytes]:
    """Yield a chunk for the role, the text, each call and the end; the turn is already complete."""
    options = body.get("stream_options")
    with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    head = {**_head(answer, body, "chat.completion.chunk"), **({"usage": None} if with_usage else {})}

    def chunk(delta: dict[str, Any], reason: str | None = None, log_probs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": log_probs}
        return event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    yield chunk({"content": answer.text}, log_probs=_log_probs(answer, body))
    for place, call in enumerate(_calls(answer)):
        yield chunk({"tool_calls": [{"index": place, **call}]})
    yield chunk({}, _finish_reason(answer))
    if with_usage:
        yield event({**head, "choices": [], "usage": _usage(answer)})
    yield event("[DONE]")


def _head(answer: Answered, body: dict[str, Any], kind: str) -> dict[str, Any]:
    model = str(body.get("model", "policy"))
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": int(time.time()), "model": model}


def _calls(answer: Answered) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{call.id}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in answer.calls
    ]


def _finish_reason(answer: Answered) -> str:
    return "tool_calls" if answer.calls else "stop"


def _log_probs(answer: Answered, body: dict[str, Any]) -> dict[str, Any] | None:
    return {"content": answer.log_probs, "refusal": None} if body.get("logprobs") else None


def _usage(answer: Answered) -> dict[str, int]:
    asked, sampled = answer.turn.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}


def error(refused: Refused) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    message = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": None}
    return {"error": message}


CHAT_COMPLETIONS = Protocol(
    path="/v1/chat/completions",
    read=_read,
    whole=_whole,
    events=_events,
    error=error,
    ping=b": the model answers\n\n",
)
