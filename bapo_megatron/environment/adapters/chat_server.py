"""Endpoint for agent programs in a worker: OpenAI's chat completions on loopback, answered by the policy.

One server for all episodes of a worker's event loop; the API key of a request says to which episode it
belongs. Needs aiohttp. Used by ``endpoint.py``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from bapo_megatron.environment.tools.calls import tool_calls, without_calls

Answer = Callable[[dict[str, Any]], Awaitable[str]]
"""What answers a request of an episode. Raises ``Refused``."""

Said = tuple[str, str]
"""Role and text of a message. An assistant's text is not compared: programs write calls as they like."""

_NOT_OFFERED = {"stream": (None, False), "logprobs": (None, False), "n": (None, 1)}
"""Fields of a request that change the answer's form, with the values that do not."""

_URLS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[str]] = WeakKeyDictionary()
_ANSWERS: dict[str, Answer] = {}


class Refused(Exception):
    """Refusal of a request, with its HTTP status and the reason. Raised by ``EndpointEnvironment``."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def opened(key: str, answer: Answer) -> str:
    """The base URL, for ``key``, of this loop's server; it starts at the first call."""
    loop = asyncio.get_running_loop()
    if loop not in _URLS:
        _URLS[loop] = loop.create_task(_serve())
    _ANSWERS[key] = answer
    return await _URLS[loop]


def closed(key: str) -> None:
    """The episode of ``key`` is over: its requests are refused."""
    _ANSWERS.pop(key, None)


def said(messages: list[dict[str, Any]]) -> list[Said]:
    """Role and text of each message; the text of an assistant's is empty."""
    return [(str(one.get("role")), "" if one.get("role") == "assistant" else _text(one)) for one in messages]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(part.get("type") != "text" for part in parts):
        raise Refused(400, "a message has content that is no text")
    return "".join(part["text"] for part in parts)


async def _serve() -> str:
    application = web.Application(client_max_size=64 << 20)
    application.router.add_post("/v1/chat/completions", _complete)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    return f"http://{host}:{port}/v1"


async def _complete(request: web.Request) -> web.Response:
    try:
        answer = _ANSWERS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if answer is None:
            raise Refused(401, "no episode has this key")
        body = await _body(request)
        return web.json_response(_completion(await answer(body), str(body.get("model", "policy"))))
    except Refused as error:
        message = {"error": {"message": str(error), "type": "invalid_request_error"}}
        return web.json_response(message, status=error.status)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise Refused(400, "the request is no JSON") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise Refused(400, "the request has no list of messages")
    for name, allowed in _NOT_OFFERED.items():
        if body.get(name) not in allowed:
            raise Refused(400, f"{name}={body[name]!r} is not offered here: leave it out")
    return body


def _completion(turn: str, model: str) -> dict[str, Any]:
    """The answer for a turn of the model: its text, and its calls in the form of Qwen and Hermes models."""
    calls = []
    for number, call in enumerate(tool_calls(turn)):
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        if call.problem is None:
            calls.append({"id": f"call_{number}", "type": "function", "function": function})
    message = {"role": "assistant", "content": without_calls(turn) if calls else turn}
    finished = {"finish_reason": "tool_calls" if calls else "stop"}
    choice = {"index": 0, "message": {**message, **({"tool_calls": calls} if calls else {})}, **finished}
    about = {"id": "turn", "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**about, "choices": [choice]}
