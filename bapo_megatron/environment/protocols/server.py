"""Model endpoint of agent programs: a loopback HTTP server, in a worker's event loop, answered by the policy.

``await opened(key, questions)`` registers an episode's API key, starts the server on the first call, and
returns its base URL; ``closed(key)`` ends the episode. Requests with the key go to its ``EpisodeQuestions``.
A turn is sampled to its end even if the client disappears, and a marked retry gets it. Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from bapo_megatron.environment import SampledTurn
from bapo_megatron.environment.protocols.chat import Answered, ChatRequest, Protocol, Refused, answered
from bapo_megatron.environment.protocols.chat_completions import CHAT_COMPLETIONS
from bapo_megatron.environment.protocols.messages import MESSAGES
from bapo_megatron.environment.protocols.responses import RESPONSES

PROTOCOLS = {protocol.path: protocol for protocol in (CHAT_COMPLETIONS, RESPONSES, MESSAGES)}

_OF_OPENAI = {"id": "policy", "object": "model", "created": 0, "owned_by": "bapo-megatron"}
_OF_ANTHROPIC = {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
MODELS = {"object": "list", "data": [{**_OF_OPENAI, **_OF_ANTHROPIC}], "has_more": False}
"""Model list for OpenAI's and Anthropic's clients. All model names mean the policy."""

KEEP_ALIVE_S = 10.0
"""Seconds between two pings (in JSON: leading spaces) while the model answers. Clients and proxies close a
connection that is silent for long (OpenAI's after 600 s), and a turn may take longer."""

KEPT_ANSWERS = 32
"""Number of newest answers that an episode keeps for retries; each holds the tokens of its turn."""

_URLS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[str]] = WeakKeyDictionary()
_EPISODES: dict[str, EpisodeQuestions] = {}


async def opened(key: str, questions: EpisodeQuestions) -> str:
    """Register ``key`` and return the base URL of this loop's server. The first call starts the server."""
    loop = asyncio.get_running_loop()
    if loop not in _URLS:
        _URLS[loop] = loop.create_task(_serve())
    _EPISODES[key] = questions
    return await _URLS[loop]


def closed(key: str) -> None:
    """End the episode of ``key``: its requests are refused and its turns cancelled."""
    if questions := _EPISODES.pop(key, None):
        questions.close()


class EpisodeQuestions:
    """The requests of one episode. Each asks the policy anew, but a marked retry (``Idempotency-Key``, or
    ``x-stainless-retry-count`` of OpenAI's and Anthropic's clients) gets the answer of the newest equal
    request: ``answer``."""

    def __init__(self, ask: Callable[[ChatRequest], Awaitable[SampledTurn]]) -> None:
        """``ask`` returns the policy's turn for a request, or raises ``Refused``."""
        self._ask = ask
        self._answers: list[tuple[str, asyncio.Task[Answered]]] = []
        """In the order of asking, each after its idempotency key and request digest."""
        self._asked: Counter[str] = Counter()
        self.problem = ""
        """Why the last request got no answer; empty if it got one."""

    def answer(self, request: ChatRequest, digest: str, key: str, is_retry: bool) -> asyncio.Task[Answered]:
        """Return the answer of a request, by its digest and its idempotency key, which may be empty."""
        name = key + digest
        known = [answer for other, answer in self._answers if other == name]
        if known and (is_retry or key):
            return known[-1]
        for old in [one for one in self._answers if one[1].done()][:-KEPT_ANSWERS]:
            self._answers.remove(old)
        answer = asyncio.create_task(self._answer(request, digest))
        self._answers.append((name, answer))
        return answer

    def close(self) -> None:
        for _, answer in self._answers:
            answer.cancel()

    async def _answer(self, request: ChatRequest, digest: str) -> Answered:
        repeat = self._asked[digest]
        self._asked[digest] += 1
        try:
            return answered(f"{digest[:16]}{repeat or ''}", await self._ask(request), request)
        except Refused:
            self._answers = [one for one in self._answers if one[1] is not asyncio.current_task()]
            raise


async def _serve() -> str:
    application = web.Application(client_max_size=64 << 20)
    application.router.add_route("*", "/{path:.*}", _handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    return f"http://{host}:{port}/v1"


async def _handle(request: web.Request) -> web.StreamResponse:
    offered = PROTOCOLS.get(request.path) if request.method == "POST" else None
    # Another path is refused in the form of the client's API.
    protocol = offered or (MESSAGES if "anthropic-version" in request.headers else CHAT_COMPLETIONS)
    key = request.headers.get("Authorization", "").removeprefix("Bearer ")
    questions = _EPISODES.get(key) or _EPISODES.get(request.headers.get("x-api-key", ""))
    if questions is None:
        return _refused(protocol, Refused(401, "no episode has this key"))
    if request.method == "GET" and request.path == "/v1/models":
        return web.json_response(MODELS)
    try:
        if offered is None:
            here = f"offered here are POST to {', '.join(PROTOCOLS)}"
            raise Refused(404, f"{request.method} {request.path} is not there; {here}")
        response = await _answer(request, protocol, questions)
    except Refused as refused:
        questions.problem = f"Its request was refused: {refused}"
        return _refused(protocol, refused)
    except (asyncio.CancelledError, ConnectionError):
        questions.problem = "Its client gave up a request that was not answered: raise its timeout"
        raise
    questions.problem = ""
    return response


async def _answer(
    request: web.Request, protocol: Protocol, questions: EpisodeQuestions
) -> web.StreamResponse:
    body = await _body(request)
    read = protocol.read(body)
    # After a broken stream a client may repeat its request without streaming.
    asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    digest = hashlib.sha256(json.dumps([protocol.path, asked], sort_keys=True).encode()).hexdigest()
    key = request.headers.get("Idempotency-Key", "")
    is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
    return await _deliver(request, protocol, body, questions.answer(read, digest, key, is_retry))


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        raise Refused(400, "the request is not JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request is not an object")
    return body


async def _deliver(
    request: web.Request, protocol: Protocol, body: dict[str, Any], answer: asyncio.Task[Answered]
) -> web.StreamResponse:
    """Write the answer, with pings while it takes long. Raises Refused, and after a ping, which has sent a
    status, ConnectionError: the client tries again and reads the reason."""
    is_stream = bool(body.get("stream"))
    kind = "text/event-stream" if is_stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
    while not (await asyncio.wait([answer], timeout=KEEP_ALIVE_S))[0]:
        if not response.prepared:
            await response.prepare(request)
        await response.write(protocol.ping if is_stream else b" ")
    try:
        turn = answer.result()
    except Refused as refused:
        if not response.prepared:
            raise
        raise ConnectionError("refused after it was kept alive") from refused
    if not response.prepared:
        await response.prepare(request)
    whole = () if is_stream else (json.dumps(protocol.whole(turn, body)).encode(),)
    for part in protocol.events(turn, body) if is_stream else whole:
        await response.write(part)
    await response.write_eof()
    return response


def _refused(protocol: Protocol, refused: Refused) -> web.Response:
    # OpenAI's client would retry: it treats 409 as a short lock.
    headers = {"x-should-retry": "false"}
    return web.json_response(protocol.error(refused), status=refused.status, headers=headers)
