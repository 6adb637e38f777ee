"""Two SGLang servers of one model, and routers before them, for tests."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.rollout.engines.sglang.server_process import (
    ServerProcess,
    server_environment,
    sglang_python,
)
from bapo_megatron.rollout.engines.sglang.wire import generate_payload, generation_of
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.types import GenerateRequest, Generation, SamplingParams

from .conftest import start_server

EVERY_SECOND = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "3"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
)
"""The router looks at its servers once a minute by itself; so seldom, a test would not see what it does."""


@dataclass
class Node:
    """A process that speaks HTTP."""

    process: ServerProcess

    def call(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        """Status and parsed body."""
        data = json.dumps(body or {}).encode() if method == "POST" else None
        headers = {"Content-Type": "application/json"}
        sent = urllib.request.Request(self.process.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(sent, timeout=120) as response:
                text, status = response.read().decode(), response.status
        except urllib.error.HTTPError as error:
            text, status = error.read().decode(), error.code
        return status, json.loads(text) if text.startswith(("{", "[")) else text

    def must(self, path: str, body: Any = None) -> Any:
        """The body of a call that works."""
        status, answer = self.call(path, body)
        assert status == 200, answer
        return answer

    def generate(self, asked: GenerateRequest) -> Generation:
        """The answer to a request under its own id, read as the engine reads it."""
        reply = self.must("/generate", payload(asked))
        return generation_of(asked, json.dumps(reply).encode())


def payload(asked: GenerateRequest) -> dict[str, Any]:
    """What the engine would send, under the request's own id."""
    body: dict[str, Any] = json.loads(generate_payload(asked, asked.request_id))
    return body


class Stack:
    """Two servers of one model, and routers before them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self._folder = model, folder
        self.servers = [Node(start_server(model, folder)) for _ in range(2)]
        self.routers: list[Node] = []
        self._pool = ThreadPoolExecutor(64)
        try:
            for server in self.servers:
                server.process.wait_ready(600)
        except BaseException:
            self.stop()
            raise

    def router(self, *flags: str) -> Node:
        """A router that knows both servers to be well."""
        url, command = self._router_command(flags)
        log = self._folder / f"router-{len(self.routers)}.log"
        router = Node(ServerProcess(command, server_environment(cuda=False), url, log))
        self.routers.append(router)
        deadline = time.monotonic() + 600
        while not self._sees_both(router):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return router

    def send(self, node: Node, asked: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """Begin to generate, all at once."""
        return [self._pool.submit(node.generate, one) for one in asked]

    def send_begun(self, node: Node, asked: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """Begin to generate, and return when both servers have sampled: each has done others meanwhile."""
        running = self.send(node, asked)
        for number in range(2 * len(self.servers)):
            probe = GenerateRequest(f"probe {number}", asked[0].input_ids, SamplingParams(1.0, 10, ()))
            self.servers[number % len(self.servers)].generate(probe)
        return running

    def everywhere(self, path: str, body: Any = None) -> None:
        """The same call to both servers, which must take it."""
        for server in self.servers:
            server.must(path, body)

    def load(self, folder: Path, version: int) -> None:
        """New weights, as the engine brings them: between pause and resume."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        self.everywhere("/update_weights_from_disk", {**body, "abort_all_requests": False})

    def stop(self) -> None:
        for node in (*self.routers, *self.servers):
            node.process.stop(seconds=1)
        self._pool.shutdown()

    def _sees_both(self, router: Node) -> bool:
        try:
            return health(router) == [True, True]
        except OSError:  # it does not listen yet
            return False

    def _router_command(self, flags: Sequence[str]) -> tuple[str, list[str]]:
        port, metrics = free_port(), free_port()
        command = [
            *(str(sglang_python()), "-m", "sglang_router.launch_router"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "warn"),
            *("--worker-urls", *(server.process.url for server in self.servers)),
            *EVERY_SECOND,
            *flags,
        ]
        return f"http://127.0.0.1:{port}", command


def health(router: Node) -> list[bool]:
    """Whether the router takes each of its servers for well."""
    _, answer = router.call("/workers", method="GET")
    return [worker["is_healthy"] for worker in answer["workers"]]
