"""SGLang's router before two real servers with a key: what docs/sglang.md promises of it."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bapo_megatron.rollout.engines.sglang_launch as launch_folder
from bapo_megatron.commands.doctor.servers import server_rows
from bapo_megatron.rollout.engines.sglang.server_process import ServerProcess, server_environment
from bapo_megatron.rollout.engines.sglang.wire import generate_payload, generation_of
from bapo_megatron.rollout.engines.sglang_launch.api_key import VARIABLE, make_key_file, read_key_file
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.types import GenerateRequest, Generation
from tests.unit.commands.test_doctor_servers import facts

from .conftest import FLAGS, start_server
from .references import assert_from_model, mixed_requests, request

pytestmark = pytest.mark.slow

ROUTER = Path(launch_folder.__file__).with_name("router.py")


@dataclass(frozen=True)
class Stack:
    """Two servers of one model, and a router with the flags of docs/sglang.md."""

    model: Path
    key_file: Path
    servers: Sequence[ServerProcess]
    router: ServerProcess

    def call(self, node: ServerProcess, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        """Status and parsed body of a call with the right key, or another."""
        key = key or read_key_file(self.key_file).value
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        sent = urllib.request.Request(node.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(sent, timeout=120) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def generate(self, asked: Sequence[GenerateRequest]) -> list[Generation]:
        """The router's answers to requests that are sent at once, read as the engine reads them."""

        def one(single: GenerateRequest) -> Generation:
            body = json.loads(generate_payload(single, single.request_id))
            status, answer = self.call(self.router, "/generate", body)
            assert status == 200, answer
            return generation_of(single, json.dumps(answer).encode())

        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(one, asked))


@pytest.fixture(scope="module")
def stack(
    sglang: Path, tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]
) -> Iterator[Stack]:
    if subprocess.run([sglang, "-Ic", "import sglang_router"], capture_output=True).returncode:
        pytest.skip("no sglang-router in SGLang's environment: `make sglang` installs it")
    folder, model, port = tmp_path_factory.mktemp("router"), make_model("qwen2"), free_port()
    make_key_file(key_file := folder / "api_key")
    started = [start_server(model, folder, FLAGS, key_file) for _ in range(2)]
    try:
        for server in started:
            server.wait_ready(600)
        command = [
            *(str(sglang), str(ROUTER), "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
            *("--worker-urls", *(server.url for server in started)),
            *("--policy", "cache_aware", "--cache-threshold", "0.8", "--balance-abs-threshold", "16"),
            *("--health-check-endpoint", "/model_info", "--health-check-interval-secs", "1"),
        ]
        environment = server_environment(cuda=False, key_file=key_file)
        started.append(ServerProcess(command, environment, f"http://127.0.0.1:{port}", folder / "router.log"))
        found = Stack(model, key_file, started[:2], started[2])
        _wait_for_router(found)
        yield found
    finally:
        for process in started:
            process.stop(seconds=1)


def _wait_for_router(stack: Stack) -> None:
    """Until it knows both servers to be well."""
    asked = urllib.request.Request(f"{stack.router.url}/workers")
    asked.add_header("Authorization", f"Bearer {read_key_file(stack.key_file).value}")
    deadline = time.monotonic() + 600
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=5) as response:
                if [one["is_healthy"] for one in json.loads(response.read())["workers"]] == [True, True]:
                    return
        except OSError:  # it does not listen yet
            pass
        assert time.monotonic() < deadline, stack.router.log.read_text()
        time.sleep(0.1)


def test_answers_pass_the_router_unchanged_and_need_the_key(stack: Stack) -> None:
    asked = [*mixed_requests(12, temperature=0.6), request("stops", new=1000, stop=tuple(range(0, 48, 6)))]
    assert_from_model(stack.model, asked, stack.generate(asked))
    for path in ("/generate", "/workers"):
        assert stack.call(stack.router, path, {}, "o" * 43)[0] == 401
    for path in ("/pause_generation", "/update_weights_from_disk"):
        assert stack.call(stack.router, path, {})[0] == 404
    assert read_key_file(stack.key_file).value not in stack.router.log.read_text()


def test_responses_of_a_prompt_stay_together_on_both_servers(stack: Stack) -> None:
    """Prompts that begin alike. The servers are told apart by a version that stands for them."""
    for number, server in enumerate(stack.servers, start=1):
        version = {"new_version": str(number), "abort_all_requests": False}
        assert stack.call(server, "/update_weight_version", version)[0] == 200
    rng = np.random.default_rng(0)
    begin = rng.integers(0, 48, 20).tolist()
    prompts = [begin + rng.integers(0, 48, 20).tolist() for _ in range(8)]
    asked = [request(f"g{g}-{k}", prompts[g], new=20) for g in range(8) for k in range(6)]
    served = np.array([answer.versions_R[0] for answer in stack.generate(asked)]).reshape(8, 6)
    assert (served == served[:, :1]).all()
    assert len(set(served[:, 0].tolist())) == 2


def test_the_doctor_distinguishes_servers_from_a_router(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(stack.key_file))
    recipe = facts(*(server.url for server in stack.servers))
    assert {row.state for row in server_rows(recipe)} == {"ok"}
    (row,) = server_rows(replace(recipe, urls=[stack.router.url]))
    assert (row.state, row.found) == ("problem", "answers, and has no /ready")
    assert "for a router its servers" in row.fix
