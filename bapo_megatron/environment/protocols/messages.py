"""Server side of Anthropic's messages API, ``POST /v1/messages``, for agent programs.

``MESSAGES`` is its ``Protocol`` (chat.py): translates a request body with system text and tool blocks into a
``ChatRequest`` in OpenAI's format, and formats the policy's turn (``Answered``) as a whole or streamed reply.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bapo_megatron.environment.protocols.chat import (
    Answered,
    ChatRequest,
    Protocol,
    Refused,
    event,
    list_of,
    text_of,
    tool_schema,
)

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error"}
_THOUGHTS = ("thinking", "redacted_thinking")


def _read(body: dict[str, Any]) -> ChatRequest:
    if not isinstance(body.get("messages"), list):
        raise Refused(400, "the request has no list of messages")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    system = body.get("system")
    messages = [{"role": "system", "content": text_of("system", system)}] if system else []
    for place, message in enumerate(body["messages"]):
        messages += _messages(f"message {place}", message)
    return ChatRequest(messages, [_tool(tool) for tool in list_of(body, "tools")], kind != "none")


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise Refused(400, f"the tool {str(tool)[:80]} is not offered here: only those of the program are")
    return tool_schema(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _messages(place: str, message: Any) -> list[dict[str, Any]]:
    """Return a message in OpenAI's chat format, where tool results are separate messages."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise Refused(400, f"{place} is not an object with a role: user or assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(part, dict) for part in blocks):
        raise Refused(400, f"{place} has a content that is neither text nor a list of blocks")
    if message["role"] == "assistant":
        return [_turn(place, blocks)]
    made, said = [], []
    for block in blocks:
        if block.get("type") == "tool_result":
            result = text_of(place, block.get("content"))
            made.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            said.append(block)
    if said or not made:
        made.append({"role": message["role"], "content": text_of(place, said)})
    return made


def _turn(place: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    said = [part for part in blocks if part.get("type") not in ("tool_use", *_THOUGHTS)]
    turn = {"role": "assistant", "content": text_of(place, said)}
    return {**turn, "tool_calls": calls} if calls else turn


def _blocks(answer: Answered) -> list[dict[str, Any]]:
    calls = [
        {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": call.arguments}
        for call in answer.calls
    ]
    return [{"type": "text", "text": answer.text}, *calls] if answer.text or not calls else calls


def _whole(answer: Answered, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.name}",
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model", "policy")),
        "content": _blocks(answer),
        "stop_reason": "tool_use" if answer.calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": answer.turn.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def _events(answer: Answered, body: dict[str, Any]) -> Iterator[bytes]:
    whole = _whole(answer, body)
    usage = {**whole["usage"], "output_tokens": 0}
    yield _event("message_start", message={**whole, "content": [], "stop_reason": None, "usage": usage})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            begun, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block=begun)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=end, usage={"output_tokens": answer.completion_tokens})
    yield _event("message_stop")


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _error(refused: Refused) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


MESSAGES = Protocol(
    path="/v1/messages",
    read=_read,
    whole=_whole,
    events=_events,
    error=_error,
    ping=_event("ping"),
)
