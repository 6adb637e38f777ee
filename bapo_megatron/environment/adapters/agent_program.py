"""Agent programs in a worker: processes, and OpenAI's chat completions on loopback.

One server answers all episodes of a worker's event loop; the API key of a request says to which episode it
belongs. A program's task goes through a pipe, which is empty once it is read: it holds the ground truth, and
what the program runs for the policy, in a sandbox too, inherits its standard input, where a file could be
read again. Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from bapo_megatron.environment.adapters.conversation import Refused
from bapo_megatron.environment.tools.calls import tool_calls, without_calls
from bapo_megatron.runtime.child_process import ChildProcess
from bapo_megatron.runtime.http import without_proxy

Answer = Callable[[dict[str, Any]], Awaitable[str]]
"""What answers a request of an episode. Raises ``Refused``."""

KEEP_ALIVE_S = 10.0
"""Time between two blanks, which JSON may begin with, that are sent while the model answers: clients and
proxies end a connection that is silent for long (OpenAI's after 600 s), and a turn may take longer."""

_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "logprobs": (None, False),
    "n": (None, 1),
}
"""Fields of a request that change the answer's form, with the values that do not."""

_UNHEEDED: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "functions": (None, []),
    "stop": (None, []),
    "max_tokens": (None,),
    "max_completion_tokens": (None,),
}
"""Fields that bind the model where they are heeded, with the values that do not. Here they do nothing."""

_TOLD: set[str] = set()
"""Those of which this worker has told."""

_TAIL_BYTES = 1 << 16
"""The end of its output in which its last word is looked for: some print all that they do."""

_URLS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[str]] = WeakKeyDictionary()
_ANSWERS: dict[str, Answer] = {}


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


async def _serve() -> str:
    application = web.Application(client_max_size=64 << 20)
    application.router.add_post("/v1/chat/completions", _complete)
    application.router.add_route("*", "/{rest:.*}", _not_here)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    return f"http://{host}:{port}/v1"


async def _complete(request: web.Request) -> web.StreamResponse:
    try:
        answer = _ANSWERS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if answer is None:
            raise Refused(401, "no episode has this key")
        body = await _body(request)
        return await _answered(request, body, asyncio.ensure_future(answer(body)))
    except Refused as error:
        return _refused(error)


async def _not_here(request: web.Request) -> web.Response:
    offered = "POST /v1/chat/completions alone is offered here: set the client to chat completions"
    return _refused(Refused(404, f"{request.method} {request.path} is not there; {offered}"))


def _refused(error: Refused) -> web.Response:
    message = {"error": {"message": str(error), "type": "invalid_request_error"}}
    # OpenAI's client would ask again: it takes 409 for a lock that is soon free.
    return web.json_response(message, status=error.status, headers={"x-should-retry": "false"})


async def _answered(
    request: web.Request, body: dict[str, Any], turn: asyncio.Future[str]
) -> web.StreamResponse:
    """The answer to a request, which begins with blanks if it takes long. Refused, at once if at all."""
    response: web.StreamResponse | None = None
    try:
        while not (await asyncio.wait([turn], timeout=KEEP_ALIVE_S))[0]:
            if response is None:
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                await response.prepare(request)
            await response.write(b" ")
        completion = _completion(turn.result(), body)
    finally:
        turn.cancel()
    if response is None:
        return web.json_response(completion)
    await response.write(json.dumps(completion).encode())
    await response.write_eof()
    return response


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        raise Refused(400, "the request is no JSON") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise Refused(400, "the request has no list of messages")
    for name, allowed in _NOT_OFFERED.items():
        if body.get(name) not in allowed:
            raise Refused(400, f"{name}={body[name]!r} is not offered here: leave it out")
    for name, allowed in _UNHEEDED.items():
        if body.get(name) not in allowed and name not in _TOLD:
            _TOLD.add(name)
            print(
                f"environment: the agent's requests have {name}={repr(body[name])[:80]}, which does nothing "
                "here: the run's settings say how its model samples",
                file=sys.stderr,
                flush=True,
            )
    return body


def _completion(turn: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer for a turn of the model: its text, and its calls in OpenAI's form.

    Ids differ from turn to turn, because programs keep answers and calls by them, and are the same after a
    replay. Tokens are not counted here; programs that add up ``usage`` read zeros.
    """
    number = sum(one["role"] == "assistant" for one in body["messages"])
    calls: list[dict[str, Any]] = []
    offered = body.get("tools")
    for call in tool_calls(turn, offered if isinstance(offered, list) else []):
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        if call.problem is None:
            calls.append({"id": f"call_{number}_{len(calls)}", "type": "function", "function": function})
    message = {"role": "assistant", "content": without_calls(turn) if calls else turn}
    choice = {
        "index": 0,
        "message": {**message, **({"tool_calls": calls} if calls else {})},
        "finish_reason": "tool_calls" if calls else "stop",
        "logprobs": None,
    }
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(body.get("model", "policy")),
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


async def run_agent(command: Sequence[str], task: bytes, variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a program with ``task`` on its standard input: its exit code, and the last word of its output.

    ``variables``: for it, besides those of this process. It reaches this machine without a proxy, which would
    see the policy's turns and the episode's key. It and its descendants end with the call. OSError if it
    cannot be started.
    """
    environment = {**os.environ, **without_proxy(), **variables}
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as printed:
        try:
            child = ChildProcess(command, environment, guarded=True, stdin=reading, stdout=printed)
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        # In a thread of its own: a program that reads late must hold up nobody whose task fills its pipe.
        threading.Thread(target=_write, args=(writing, task), daemon=True).start()
        pause_s = 0.02
        try:
            while (code := child.wait_end(0)) is None:
                await asyncio.sleep(pause_s := min(1.1 * pause_s, 0.25))  # there may be hundreds
        finally:
            await asyncio.shield(asyncio.to_thread(child.close))
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _TAIL_BYTES))
        words = printed.read().decode(errors="replace").split()
    return code, words[-1] if words else ""


def _write(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb") as pipe:  # it need not read its task
        pipe.write(data)
