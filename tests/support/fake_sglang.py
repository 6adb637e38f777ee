"""A small HTTP server that answers as SGLang documents it, or as it is told."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from aiohttp import web

from bapo_megatron.rollout.engines.sglang.authorization import Authorization


class Keyless(Authorization):
    """Headers of calls to a server without a key, which is not probed for one."""

    def __init__(self) -> None:
        super().__init__("", lambda: None)

    async def headers(self) -> dict[str, str]:
        return {}


class FakeServer:
    """Answers like SGLang, or as it is told."""

    def __init__(self) -> None:
        self.version = "0"
        self.answers: dict[str, tuple[int, Any]] = {}
        """Path to the status and body that replace its own."""
        self.raw: dict[str, web.Response] = {}
        """Path to the whole answer that replaces its own."""
        self.hangs: set[str] = set()
        self.on_abort: list[int] = []
        """Requests wait for an abort, and have so many tokens then: one entry for each."""
        self.connections: list[Any] = []
        """The other end of each request's."""
        self.cuts = 0
        """So many calls of ``cut_path`` are cut off without an answer."""
        self.cut_path = "generate"
        self.ended: set[Any] = set()
        """Connections that end when something more comes over them."""
        self.rids: list[str] = []
        """Of all requests that came, also those that were cut off."""
        self.paused = False
        self._aborted: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._runner, self.url = self._wait(self._start())

    def stop(self) -> None:
        self._wait(self._runner.cleanup())

    async def _start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_route("*", "/{path}", self._handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        return runner, f"http://127.0.0.1:{port}"

    async def _handle(self, request: web.Request) -> web.Response:
        path = request.path.lstrip("/")
        self.connections.append(request.transport.get_extra_info("peername"))
        body = await request.json() if request.can_read_body else {}
        if path == "generate":
            self.rids.append(body["rid"])
        if self.connections[-1] in self.ended or self._ends(path, body):
            request.transport.close()
            return web.Response()
        if path == self.cut_path and self.cuts:
            self.cuts -= 1
            request.transport.close()
            return web.Response()
        if (request.method == "GET") != (path in ("model_info", "server_info")):  # as SGLang's routes
            return web.Response(status=405)
        if path in self.hangs:
            await asyncio.sleep(3)
        if path in self.raw:
            return self.raw[path]
        if path in self.answers:
            status, answer = self.answers[path]
            return web.json_response(answer, status=status)
        if path == "update_weights_from_disk":
            self.version = body["weight_version"]
        if path in ("pause_generation", "continue_generation"):
            self.paused = path == "pause_generation"
        if path == "abort_request" and not self.paused:
            for rid, event in self._aborted.items():
                if rid == body.get("rid") or body.get("abort_all"):
                    event.set()
        if path == "generate" and self.on_abort:
            tokens = self.on_abort.pop(0)
            await self._aborted.setdefault(body["rid"], asyncio.Event()).wait()
            return web.json_response(self._answer(path, tokens, "abort"))
        return web.json_response(self._answer(path))

    def _ends(self, _path: str, _body: dict[str, Any]) -> bool:
        """Whether this call ends it: the connection is closed without an answer."""
        return False

    def _answer(self, path: str, tokens: int = 2, reason: str = "length") -> Any:
        if path == "generate":
            meta = {"finish_reason": {"type": reason}, "weight_version": self.version}
            pairs = [[-1.0, 3, None], [-2.0, 4, None]][:tokens]
            return {"output_ids": [3, 4][:tokens], "meta_info": {**meta, "output_token_logprobs": pairs}}
        if path == "weights_checker":
            return {"per_engine_checksum": f"of {self.version}"}
        return {"success": True, "weight_version": self.version}

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=20)
