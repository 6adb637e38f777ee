"""Simulated SGLang engines, hundreds in one process: their HTTP interface, with tokens at a fixed rate.

Each segment runs alone, at ``rate`` tokens/s +- 20 %: at one rate, requests that began together would return
together forever. Lengths are log-normal, cut at the run's longest; with sigma 0 each request is a turn of
median length. Whether a response stops in a segment follows from its length so far: no state is kept between
requests. Answers are slices of one prepared buffer: realistic bytes at almost no cost.

``python -m benchmarks.fake_engines ENGINES RATE MEDIAN SIGMA LONGEST`` prints its port and serves until its
input closes; ``GET /idle`` returns the engines' mean load since the last call.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import resource
import sys
import time
from statistics import NormalDist
from typing import Any

from aiohttp import web

EOS = 2
_TOKENS = 1 << 16
_NORMAL = NormalDist()


class Engines:
    """All simulated engines, each at a path: /0, /1, ..."""

    def __init__(self, count: int, rate: float, median: float, sigma: float, longest: int) -> None:
        self._rate, self._mu, self._sigma, self._longest = rate, math.log(median), sigma, longest
        self._version = ["0"] * count
        self._random = random.Random(0)
        self._in_flight = [0] * count
        self._places, self._working = Integral(), Integral()
        rows = [
            f"[-{(i % 7) + (i * 0.6180339887498949) % 1!r},{3 + i % 150_000},null]" for i in range(_TOKENS)
        ]
        ids = [str(3 + i % 150_000) for i in range(_TOKENS)]
        self._rows, self._row_ends = _joined(rows)
        self._ids, self._id_ends = _joined(ids)

    async def handle(self, request: web.Request) -> web.Response:
        """Handle any call to an engine."""
        engine, path = int(request.match_info["engine"]), request.match_info["path"]
        if path == "generate":
            return await self._generate(engine, await request.read())
        body = await request.json() if request.can_read_body else {}
        if path == "update_weights_from_disk":
            self._version[engine] = body["weight_version"]
        version = self._version[engine]
        reply = {"success": True, "weight_version": version, "per_engine_checksum": version}
        return web.json_response(reply)

    async def idle(self, _request: web.Request) -> web.Response:
        """Mean requests in flight and mean busy engines since the last call."""
        load = {"in_flight": self._places.take(), "working": self._working.take()}
        return web.json_response(load)

    async def _generate(self, engine: int, body: bytes) -> web.Response:
        most = int(re.search(rb'"max_new_tokens": ?(\d+)', body)[1])  # type: ignore[index]
        start = body.count(b",", body.index(b'"input_ids"'))
        tokens, stops = self._length(start, most)
        version = self._version[engine]
        self._count(engine, 1)
        try:
            await asyncio.sleep(tokens / self._rate * self._random.uniform(0.8, 1.2))
        finally:
            self._count(engine, -1)
        answer = self._answer(tokens, stops, version)
        return web.Response(body=answer, content_type="application/json")

    def _count(self, engine: int, change: int) -> None:
        before = self._in_flight[engine]
        self._in_flight[engine] += change
        self._places.add(change)
        self._working.add((before + change > 0) - (before > 0))

    def _length(self, start: int, most: int) -> tuple[int, bool]:
        """Tokens of this segment, and whether the response stops in it: log-normal, given ``start``."""
        if not self._sigma:
            return min(most, round(math.exp(self._mu))), True
        before = _NORMAL.cdf((math.log(max(start, 1)) - self._mu) / self._sigma)
        drawn = before + (1 - before) * self._random.random()
        total = math.exp(self._mu + self._sigma * _NORMAL.inv_cdf(min(max(drawn, 1e-12), 1 - 1e-12)))
        left = max(1, round(total) - start)
        stops = left <= most and start + left <= self._longest
        return (left, True) if stops else (most, False)

    def _answer(self, tokens: int, stops: bool, version: str) -> bytes:
        rows, ids = self._rows[: self._row_ends[tokens - 1]], self._ids[: self._id_ends[tokens - 1]]
        reason = b'{"type":"length"}'
        if stops:  # the last token is EOS
            rows = self._rows[: self._row_ends[tokens - 2] + 1] if tokens > 1 else b""
            ids = self._ids[: self._id_ends[tokens - 2] + 1] if tokens > 1 else b""
            rows, ids, reason = rows + b"[-0.5,2,null]", ids + b"2", b'{"type":"stop"}'
        meta = b'"meta_info":{"finish_reason":%b,"weight_version":"%b"' % (reason, version.encode())
        return b'{"output_ids":[%b],%b,"output_token_logprobs":[%b]}}' % (ids, meta, rows)


def _joined(parts: list[str]) -> tuple[bytes, list[int]]:
    """The parts joined by commas, and the end of each."""
    ends, at = [], -1
    for part in parts:
        at += len(part) + 1
        ends.append(at)
    return ",".join(parts).encode(), ends


class Integral:
    """Time average of a step function."""

    def __init__(self) -> None:
        self._value, self._sum, self._start, self._last = 0, 0.0, time.monotonic(), time.monotonic()

    def add(self, change: int) -> None:
        """Change the function's value by ``change``."""
        now = time.monotonic()
        self._sum += self._value * (now - self._last)
        self._value, self._last = self._value + change, now

    def take(self) -> float:
        """Return the average since the last call."""
        self.add(0)
        seconds = self._last - self._start
        mean, self._sum, self._start = self._sum / max(seconds, 1e-9), 0.0, self._last
        return mean


async def serve(engines: Engines) -> None:
    """Print the port and serve until the input closes."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/idle", engines.idle)
    app.router.add_route("*", "/{engine}/{path}", engines.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1 << 15).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main(arguments: list[Any]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count, rate, median, sigma, longest = (float(value) for value in arguments)
    asyncio.run(serve(Engines(int(count), rate, median, sigma, int(longest))))


if __name__ == "__main__":
    main(sys.argv[1:])
