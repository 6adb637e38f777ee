"""A server of rewards on this machine, in a thread: it answers what a test tells it to, and keeps what it was
asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


class JudgeServer:
    """The server: ``answers`` are used up one by one, the last one for ever. With ``holds`` they wait for
    ``release``."""

    def __init__(self, *answers: Answer, holds: bool = False) -> None:
        self._answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        if not holds:
            self._released.set()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def release(self) -> None:
        self._tell(self._released.set)

    def run(self) -> None:
        with closing(self._loop):
            self._loop.run_until_complete(self._serve())

    def wait_started(self) -> None:
        assert self._started.wait(120)

    def stop(self) -> None:
        self._tell(self._stop.set)

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(what)

    async def _serve(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({"path": request.path, **request.headers})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        try:
            await self._released.wait()
            return await answer(body, request)
        finally:
            self.at_once -= 1


@contextmanager
def judge_server(*answers: Answer, holds: bool = False) -> Iterator[JudgeServer]:
    server = JudgeServer(*answers, holds=holds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    server.wait_started()
    try:
        yield server
    finally:
        server.release()
        server.stop()
        thread.join(60)


def says(value: Any, state: int = 200) -> Answer:
    return raw(json.dumps(value), state)


def raw(text: str, state: int = 200, **headers: str) -> Answer:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=state, headers=headers)

    return answer


def completion(text: Any) -> dict[str, Any]:
    """A chat completion with this text."""
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}


def judged(text: str) -> Answer:
    """A chat completion."""
    return says(completion(text))


async def nonsense(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """What is no HTTP."""
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 nonsense\r\n\r\n")  # type: ignore[attr-defined]
    return web.StreamResponse()


async def cut(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Half an answer, then the connection ends."""
    response = await _half(request)
    assert request.transport is not None
    request.transport.abort()
    return response


async def hang_midway(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Half an answer, then nothing."""
    response = await _half(request)
    await asyncio.sleep(3600)
    return response


async def _half(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    return response
