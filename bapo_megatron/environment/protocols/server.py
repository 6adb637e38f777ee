"""HTTP server of agent programs, one for a worker's event loop, on loopback: episodes by their keys.

The API key of a request says to which episode it belongs. A question is asked once: a turn outlives the
request, whose client may be gone, and a retry gets it (``EpisodeQuestions``). Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from bapo_megatron.environment import SampledTurn
from bapo_megatron.environment.protocols.chat import Answered, ChatRequest, Protocol, Refused, answered
from bapo_megatron.environment.protocols.chat_completions import CHAT_COMPLETIONS
from bapo_megatron.environment.protocols.messages import MESSAGES
from bapo_megatron.environment.protocols.responses import RESPONSES

PROTOCOLS = (CHAT_COMPLETIONS, RESPONSES, MESSAGES)

KEEP_ALIVE_S = 10.0
"""Time between two pings, or blanks, which JSON may begin with, that are sent while the model answers:
clients and proxies end a connection that is silent for long (OpenAI's after 600 s), and a turn may take
longer."""

KEPT_ANSWERS = 32
"""Answers that an episode keeps for retries, the newest: each has the tokens of its turn."""

_URLS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[str]] = WeakKeyDictionary()
_EPISODES: dict[str, EpisodeQuestions] = {}


async def opened(key: str, questions: EpisodeQuestions) -> str:
    """The base URL, for ``key``, of this loop's server; it starts at the first call."""
    loop = asyncio.get_running_loop()
    if loop not in _URLS:
        _URLS[loop] = loop.create_task(_serve())
    _EPISODES[key] = questions
    return await _URLS[loop]


def closed(key: str) -> None:
    """The episode of ``key`` is over: its requests are refused, its turns given up."""
    if questions := _EPISODES.pop(key, None):
        questions.close()


@dataclass
class _Question:
    """A question of an episode, and who waits for its answer."""

    name: str
    digest: str
    answer: asyncio.Task[Answered]
    clients: int = 0
    is_delivered: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has got the answer, or is gone."""


class EpisodeQuestions:
    """The questions of an episode. Each is asked once, whoever asks it again: a retry (``Idempotency-Key``,
    or ``x-stainless-retry-count`` of OpenAI's and Anthropic's clients), or the same request where no
    answer was written. Made for an episode by ``EndpointEnvironment``, kept by its key."""

    def __init__(self, ask: Callable[[ChatRequest], Awaitable[SampledTurn]]) -> None:
        """``ask``: the model's turn for a request. Raises ``Refused``."""
        self._ask = ask
        self._questions: dict[str, _Question] = {}
        """By their idempotency keys, or the digests of their requests."""
        self._repeats: dict[str, int] = {}
        self.problem = ""
        """Why its last request has got no answer; empty if it has."""

    @asynccontextmanager
    async def question(
        self, request: ChatRequest, digest: str, key: str, is_retry: bool
    ) -> AsyncIterator[_Question]:
        """The question of a request: a new one, or the one that it asks again.

        A request without a mark that equals one whose client waits may be a retry, or one for a second
        answer: it waits until that client has its answer, or is gone.
        """
        while not self._is_new(name := key or digest, is_retry or bool(key)):
            question = self._questions[name]
            if question.digest != digest:
                raise Refused(400, "its idempotency key is that of another request")
            if is_retry or key or not question.clients:
                break
            question.left.clear()
            await question.left.wait()
        else:
            question = self._questions[name] = self._asked(request, digest)
        question.clients += 1
        try:
            yield question
            question.is_delivered, self.problem = True, ""
        except Refused as refused:
            self._questions.pop(name, None)
            self.problem = f"Its request was refused: {refused}"
            raise
        except (asyncio.CancelledError, ConnectionError):
            self.problem = "Its client gave up a request that the model had not answered: raise its timeout"
            raise
        finally:
            question.clients -= 1
            question.left.set()

    def close(self) -> None:
        for question in self._questions.values():
            question.answer.cancel()

    def _is_new(self, name: str, is_marked: bool) -> bool:
        known = self._questions.get(name)
        return known is None or (known.is_delivered and not known.clients and not is_marked)

    def _asked(self, request: ChatRequest, digest: str) -> _Question:
        delivered = [
            name
            for name, question in self._questions.items()
            if question.is_delivered and not question.clients
        ]
        for old in delivered[:-KEPT_ANSWERS]:
            del self._questions[old]
        repeat = self._repeats[digest] = self._repeats.get(digest, -1) + 1
        name = f"{digest[:16]}{repeat or ''}"

        async def answer() -> Answered:
            return answered(name, await self._ask(request), request)

        return _Question(name, digest, asyncio.create_task(answer()))


async def _serve() -> str:
    application = web.Application(client_max_size=64 << 20)
    for protocol in PROTOCOLS:
        application.router.add_post(protocol.path, partial(_handle, protocol))
    application.router.add_get("/v1/models", _models)
    application.router.add_route("*", "/{rest:.*}", _not_here)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    return f"http://{host}:{port}/v1"


async def _handle(protocol: Protocol, request: web.Request) -> web.StreamResponse:
    try:
        questions = _questions_of(request)
        body = await _body(request)
        read = protocol.read(body)
        # A client may ask for the same without a stream, after one that broke.
        asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        digest = hashlib.sha256(json.dumps([protocol.path, asked], sort_keys=True).encode()).hexdigest()
        key = request.headers.get("Idempotency-Key", "")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        async with questions.question(read, digest, key, is_retry) as question:
            return await _deliver(request, protocol, body, question.answer)
    except Refused as refused:
        return _refused(protocol, refused)


def _questions_of(request: web.Request) -> EpisodeQuestions:
    key = request.headers.get("Authorization", "").removeprefix("Bearer ")
    questions = _EPISODES.get(key) or _EPISODES.get(request.headers.get("x-api-key", ""))
    if questions is None:
        raise Refused(401, "no episode has this key")
    return questions


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
    """Write the answer, with pings before it if it takes long. Refused, if nothing is written yet."""
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
        if not is_stream:  # its status is sent: the client shall ask again, and read the reason
            raise ConnectionError("refused after it was kept alive") from refused
        parts = [protocol.error_event(refused)]
    else:
        whole = json.dumps(protocol.whole(turn, body)).encode() if not is_stream else b""
        parts = list(protocol.events(turn, body)) if is_stream else [whole]
    if not response.prepared:
        await response.prepare(request)
    for part in parts:
        await response.write(part)
    await response.write_eof()
    return response


def _refused(protocol: Protocol, refused: Refused) -> web.Response:
    # OpenAI's client would ask again: it takes 409 for a lock that is soon free.
    headers = {"x-should-retry": "false"}
    return web.json_response(protocol.error(refused), status=refused.status, headers=headers)


async def _models(request: web.Request) -> web.Response:
    """The list of models in a form that OpenAI's and Anthropic's clients read. All names are the policy's."""
    try:
        _questions_of(request)
    except Refused as refused:
        return _refused(_protocol_of(request), refused)
    about = {"id": "policy", "object": "model", "created": 0, "owned_by": "bapo-megatron"}
    other = {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
    return web.json_response({"object": "list", "data": [{**about, **other}], "has_more": False})


async def _not_here(request: web.Request) -> web.Response:
    offered = ", ".join(protocol.path for protocol in PROTOCOLS)
    reason = f"{request.method} {request.path} is not there; offered here are POST to {offered}"
    return _refused(_protocol_of(request), Refused(404, reason))


def _protocol_of(request: web.Request) -> Protocol:
    """The protocol in whose form a request on no protocol's path is refused."""
    return MESSAGES if "anthropic-version" in request.headers else CHAT_COMPLETIONS
