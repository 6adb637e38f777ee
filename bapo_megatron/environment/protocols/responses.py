"""Server side of OpenAI's responses API, ``POST /v1/responses``, for agent programs.

``RESPONSES`` is its ``Protocol`` (chat.py): translates a request body's input items into a ``ChatRequest``,
and formats the policy's turn (``Answered``) as output items, whole or streamed. Refuses server-side state.
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
    ToolUse,
    event,
    list_of,
    refuse_others,
    text_of,
    tool_schema,
)
from bapo_megatron.environment.protocols.chat_completions import error

_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "top_logprobs": (None, 0),
}
"""Fields that need server state or change the reply's form, with the values that do not."""

_LOG_PROBS = "message.output_text.logprobs"


def _read(body: dict[str, Any]) -> ChatRequest:
    refuse_others(body, _NOT_OFFERED)
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text_of("instructions", body["instructions"])})
    said = body.get("input")
    items = [{"role": "user", "content": said}] if isinstance(said, str) else list_of(body, "input")
    for place, item in enumerate(items):
        message = _message(f"item {place} of input", item)
        if message is None:
            continue
        if messages and messages[-1]["role"] == message["role"] == "assistant":  # items of one turn
            _join(messages[-1], message)
        else:
            messages.append(message)
    if not messages:
        raise Refused(400, "the request has no input")
    tools = [_tool(tool) for tool in list_of(body, "tools")]
    return ChatRequest(messages, tools, body.get("tool_choice") != "none")


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Refused(400, f"the tool {str(tool)[:80]} is not offered here: only functions are")
    return tool_schema(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _message(place: str, item: Any) -> dict[str, Any] | None:
    """Return an item in OpenAI's chat format; None for thoughts, which the policy's tokens contain."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "reasoning":
        return None
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = text_of(place, item.get("output"), ("input_text", "output_text", "text"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind != "message" or not isinstance(item.get("role"), str):
        raise Refused(
            400, f"{place} is not a message, function_call or function_call_output: {str(item)[:80]}"
        )
    text = text_of(place, item.get("content"), ("input_text", "output_text", "text"))
    return {"role": "system" if item["role"] == "developer" else item["role"], "content": text}


def _join(turn: dict[str, Any], more: dict[str, Any]) -> None:
    turn["content"] += more["content"]
    if calls := more.get("tool_calls"):
        turn["tool_calls"] = [*turn.get("tool_calls", []), *calls]


def _text_part(answer: Answered, body: dict[str, Any]) -> dict[str, Any]:
    log_probs = answer.log_probs if _LOG_PROBS in list_of(body, "include") else []
    return {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": log_probs}


def _text_item(answer: Answered, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    about = {"type": "message", "id": f"msg_{answer.name}", "role": "assistant"}
    return {**about, "status": status, "content": parts}


def _call_item(call: ToolUse, arguments: str, status: str) -> dict[str, Any]:
    about = {"type": "function_call", "id": f"fc_{call.id}", "call_id": f"call_{call.id}"}
    return {**about, "name": call.name, "arguments": arguments, "status": status}


def _whole(answer: Answered, body: dict[str, Any]) -> dict[str, Any]:
    said = [_text_item(answer, [_text_part(answer, body)], "completed")]
    calls = [_call_item(call, json.dumps(call.arguments), "completed") for call in answer.calls]
    asked, sampled = answer.turn.prompt_tokens, answer.completion_tokens
    usage = {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + sampled,
    }
    output = [*said, *calls] if answer.text or not calls else calls
    return {**_head(answer, body), "status": "completed", "output": output, "usage": usage}


def _head(answer: Answered, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.name}",
        "object": "response",
        "created_at": int(time.time()),
        "model": str(body.get("model", "policy")),
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
    }


def _events(answer: Answered, body: dict[str, Any]) -> Iterator[bytes]:
    for number, (name, fields) in enumerate(_named_events(answer, body)):
        yield event({"type": name, "sequence_number": number, **fields}, name)


def _named_events(answer: Answered, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = _whole(answer, body)
    begun = {**_head(answer, body), "status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    first_call = len(whole["output"]) - len(answer.calls)
    for index, item in enumerate(whole["output"]):
        if index < first_call:
            first, parts = _text_item(answer, [], "in_progress"), _text_events(item, index)
        else:
            first = _call_item(answer.calls[index - first_call], "", "in_progress")
            parts = _call_events(item, index)
        yield "response.output_item.added", {"output_index": index, "item": first}
        yield from parts
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield "response.completed", {"response": whole}


def _text_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    place = {"item_id": item["id"], "output_index": index, "content_index": 0}
    [part] = item["content"]
    yield "response.content_part.added", {**place, "part": {**part, "text": "", "logprobs": []}}
    log_probs = {"logprobs": part["logprobs"]}
    yield "response.output_text.delta", {**place, "delta": part["text"], **log_probs}
    yield "response.output_text.done", {**place, "text": part["text"], **log_probs}
    yield "response.content_part.done", {**place, "part": part}


def _call_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    place, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
    yield "response.function_call_arguments.delta", {**place, "delta": arguments}
    yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": arguments}


RESPONSES = Protocol(
    path="/v1/responses",
    read=_read,
    whole=_whole,
    events=_events,
    error=error,
    ping=b": the model answers\n\n",
)
