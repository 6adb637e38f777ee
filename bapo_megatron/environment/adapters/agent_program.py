"""Agent programs in a worker: processes, OpenAI's chat completions on loopback, conversation with the policy.

One server answers all episodes of a worker's event loop; the API key of a request says to which episode it
belongs. A program's task goes through a pipe, which is empty once it is read: it holds the ground truth, and
what the program runs for the policy, in a sandbox too, inherits its standard input, where a file could be
read again. A program keeps the tokens that were sampled, so its requests may only add messages; one that its
client gave up, because the connection broke or took longer than its own limit, may be asked again: a turn of
the model takes as long as it takes. Needs aiohttp.
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

from bapo_megatron.environment.adapters.loop import Ask
from bapo_megatron.environment.tools.calls import results, tool_calls, without_calls
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

TAKE_OVER_S = 5.0
"""Time after which a question that is asked again is a second one: the first client has not gone."""

Said = tuple[str, str]
"""Role and text of a message. An assistant's text is not compared: programs write calls as they like."""

_TURN: Said = ("assistant", "")
_SHOWN = 100
"""Characters of a message that a refusal shows."""

_URLS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[str]] = WeakKeyDictionary()
_ANSWERS: dict[str, Answer] = {}


class Refused(Exception):
    """Refusal of a request, with its HTTP status and the reason. Raised by ``Conversation``, its server."""

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


# --- the conversation ----------------------------------------------------------------------------


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
