"""Model endpoint of agent programs: a loopback HTTP server, in a worker's event loop, answered by the policy.

``await opened(key, questions)`` registers an episode's API key, starts the server on the first call, and
returns its base URL; ``closed(key)`` ends the episode. Requests with the key go to its ``EpisodeQuestions``.
A turn is sampled to its end even if the client disappears, and a retry gets it. Needs aiohttp.
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


@dataclass
class _Question:
    """A request of an episode: task of the answer, and number of waiting clients."""

    answer: asyncio.Task[Answered]
    clients: int = 0
    is_delivered: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client got the answer or disappeared."""


class EpisodeQuestions:
    """The requests of one episode. The policy answers each once, even if the client repeats it: as a retry
    (``Idempotency-Key``, or ``x-stainless-retry-count`` of OpenAI's and Anthropic's clients), or as an equal
    request before an answer was written. ``question`` yields a request's ``_Question`` with its answer."""

    def __init__(self, ask: Callable[[ChatRequest], Awaitable[SampledTurn]]) -> None:
        """``ask`` returns the policy's turn for a request, or raises ``Refused``."""
        self._ask = ask
        self._questions: dict[str, _Question] = {}
        """By idempotency key and request digest."""
        self._repeats: dict[str, int] = {}
        self.problem = ""
        """Why the last request got no answer; empty if it got one."""

    def note_refused(self, refused: Refused) -> None:
        """Record a refusal as the ``problem`` of the last request."""
        self.problem = f"Its request was refused: {refused}"

    @asynccontextmanager
    async def question(
        self, request: ChatRequest, digest: str, key: str, is_retry: bool
    ) -> AsyncIterator[_Question]:
        """Yield the question of a request: a new one, or the one that the request repeats. An unmarked
        request that equals one with a waiting client may be a retry, or ask for a second answer: it waits
        until that client has its answer or disappears."""
        while not self._is_new(name := key + digest, is_retry or bool(key)):
            question = self._questions[name]
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
            self.note_refused(refused)
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

        return _Question(asyncio.create_task(answer()))


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
    questions = None
    try:
        questions = _questions_of(request)
        body = await _body(request)
        read = protocol.read(body)
        # After a broken stream a client may repeat its request without streaming.
        asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        digest = hashlib.sha256(json.dumps([protocol.path, asked], sort_keys=True).encode()).hexdigest()
        key = request.headers.get("Idempotency-Key", "")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        async with questions.question(read, digest, key, is_retry) as question:
            return await _deliver(request, protocol, body, question.answer)
    except Refused as refused:
        return _refused(protocol, refused, questions)


def _questions_of(request: web.Request) -> EpisodeQuestions:
    if (questions := _known_questions(request)) is None:
        raise Refused(401, "no episode has this key")
    return questions


def _known_questions(request: web.Request) -> EpisodeQuestions | None:
    key = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return _EPISODES.get(key) or _EPISODES.get(request.headers.get("x-api-key", ""))


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


def _refused(protocol: Protocol, refused: Refused, questions: EpisodeQuestions | None = None) -> web.Response:
    if questions is not None:
        questions.note_refused(refused)
    # OpenAI's client would retry: it treats 409 as a short lock.
    headers = {"x-should-retry": "false"}
    return web.json_response(protocol.error(refused), status=refused.status, headers=headers)


async def _models(request: web.Request) -> web.Response:
    """Return a model list for OpenAI's and Anthropic's clients. All model names mean the policy."""
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
    return _refused(_protocol_of(request), Refused(404, reason), _known_questions(request))


def _protocol_of(request: web.Request) -> Protocol:
    """Return the protocol whose form refuses a request on an unknown path."""
    return MESSAGES if "anthropic-version" in request.headers else CHAT_COMPLETIONS
