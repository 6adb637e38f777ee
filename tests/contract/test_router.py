"""SGLang's router before two real servers: what docs/sglang.md promises, and what it warns of.

Control calls go to the servers; the router has none of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.commands.doctor.servers import server_rows
from bapo_megatron.rollout.engines.sglang.wire import generation_of
from bapo_megatron.types import GenerateRequest, Generation
from tests.unit.commands.test_doctor_servers import facts

from .references import FOREVER, mixed_requests, reference_log_probs, request
from .router_stack import Node, Stack, health, payload

pytestmark = pytest.mark.slow

MakeModel = Callable[..., Path]

TOLERANCE = 1e-4
"""Natural log; float32 on both sides."""

ALIVE = ("--health-check-endpoint", "/model_info")
"""Answers at once while a server is paused; the default, /health, does not."""


def wait_for(condition: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def stack(sglang: Path, tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Iterator[Stack]:
    if subprocess.run([sglang, "-Ic", "import sglang_router"], capture_output=True).returncode:
        pytest.skip("no sglang-router in SGLang's environment: `make sglang` installs it")
    started = Stack(tmp_path_factory.mktemp("router"), make_model("qwen2"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def router(stack: Stack) -> Node:
    """Deals requests out in turn, so that both servers have work."""
    return stack.router("--policy", "round_robin", *ALIVE)


@pytest.fixture(autouse=True)
def _first_weights(stack: Stack) -> None:
    """Version 0 on both servers, which sample and have nothing to do."""
    stack.everywhere("/continue_generation")
    stack.everywhere("/abort_request", {"abort_all": True})
    stack.everywhere("/pause_generation", {"mode": "retract"})
    stack.load(stack.model, 0)
    stack.everywhere("/continue_generation")


def assert_log_probs(folders: Sequence[Path], asked: GenerateRequest, answer: Generation) -> None:
    """Each token's log-prob is that of the weights whose version it carries: ``folders[version]``."""
    expected = np.stack([reference_log_probs(folder, asked, answer) for folder in folders])
    own = expected[answer.versions_R, np.arange(len(answer.versions_R))]
    np.testing.assert_allclose(answer.log_probs_R, own, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_log_probs_through_the_router_equal_the_models(
    stack: Stack, router: Node, temperature: float
) -> None:
    asked = mixed_requests(12, temperature=temperature)
    answers = [future.result() for future in stack.send(router, asked)]
    for one, answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids_R) == 12
        assert_log_probs([stack.model], one, answer)


def test_ids_stop_tokens_and_versions_pass_through(stack: Stack, router: Node) -> None:
    stop = tuple(range(0, 48, 6))
    asked = request("mine", new=1000, stop=stop)
    reply = router.must("/generate", payload(asked))
    assert reply["meta_info"]["id"] == "mine"
    assert reply["meta_info"]["weight_versions"] == [
        {"version": "0", "start": 0, "end": len(reply["output_ids"])}
    ]
    answer = generation_of(asked, json.dumps(reply).encode())
    assert answer.finish_reason == "stop"
    assert answer.token_ids_R[-1] in stop
    assert not set(answer.token_ids_R[:-1].tolist()) & set(stop)


def test_a_refusal_passes_through_unchanged(router: Node) -> None:
    too_long = payload(request("long", new=99999))
    status, answer = router.call("/generate", too_long)
    assert status == 400
    assert "maximum context length of 4096 tokens" in str(answer)


def test_requests_aborted_at_the_servers_return_their_tokens(stack: Stack, router: Node) -> None:
    asked = [request(f"a{number}", new=FOREVER) for number in range(4)]
    running = stack.send_begun(router, asked)
    stack.everywhere("/abort_request", {"abort_all": True})
    for one, future in zip(asked, running, strict=True):
        answer = future.result()
        assert answer.finish_reason == "abort"
        assert 5 < len(answer.token_ids_R) < FOREVER
        assert_log_probs([stack.model], one, answer)


def test_one_request_is_aborted_by_its_id(stack: Stack, router: Node) -> None:
    """The client does not know which server has it, so it asks both."""
    asked = [request(name, new=FOREVER) for name in ("kept", "dropped")]
    kept, dropped = stack.send_begun(router, asked)
    stack.everywhere("/abort_request", {"rid": "dropped"})
    assert dropped.result().finish_reason == "abort"
    assert not kept.done()
    stack.everywhere("/abort_request", {"rid": "kept"})
    assert kept.result().finish_reason == "abort"


@pytest.mark.parametrize(
    "path", ["/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"]
)
def test_the_router_takes_no_control_calls(router: Node, path: str) -> None:
    assert router.call(path, {"abort_all": True})[0] == 404


def test_weights_change_at_the_servers_while_the_router_goes_on(
    stack: Stack, router: Node, make_model: MakeModel
) -> None:
    newer = make_model("qwen2", seed=1)
    asked = [request(f"u{number}", new=1000) for number in range(4)]
    running = stack.send_begun(router, asked)
    stack.everywhere("/pause_generation", {"mode": "retract"})
    late = stack.send(router, [request("late", new=5)])
    time.sleep(4)  # the router looks at its servers meanwhile
    assert health(router) == [True, True]
    stack.load(newer, 1)
    stack.everywhere("/continue_generation")
    for one, future in zip(asked, running, strict=True):
        answer = future.result()
        assert sorted(set(answer.versions_R.tolist())) == [0, 1]
        assert_log_probs([stack.model, newer], one, answer)
    assert late[0].result().versions_R.tolist() == [1] * 5


def test_the_routers_own_health_check_drops_paused_servers(stack: Stack) -> None:
    usual = stack.router("--policy", "round_robin")
    (begun,) = stack.send_begun(usual, [request("begun", new=400)])
    stack.everywhere("/pause_generation", {"mode": "retract"})
    wait_for(lambda: health(usual) == [False, False])
    refused = payload(request("new"))
    assert usual.call("/generate", refused)[0] == 503
    stack.everywhere("/continue_generation")
    assert len(begun.result().token_ids_R) == 400  # what it had sent before is not lost
    wait_for(lambda: health(usual) == [True, True])
    usual.process.stop(seconds=1)


def test_the_doctor_distinguishes_servers_from_a_router(stack: Stack, router: Node) -> None:
    shape = json.loads((stack.model / "config.json").read_text())
    urls = [server.process.url for server in stack.servers]
    recipe = facts(*urls, longest_sequence=4088, model=shape)
    rows = list(server_rows(recipe))
    keyless = {row.found for row in rows if row.state == "optional"}  # on loopback
    assert len(keyless) == 1
    assert {row.state for row in rows} == {"ok", "optional"}
    assert {row.found for row in rows} > {"ready", "weight version 0", "context for sequences of 4088 tokens"}
    longer = server_rows(replace(recipe, longest_sequence=4089))
    problems = [row.found for row in longer if row.state == "problem"]
    assert problems == ["context for sequences of 4088 tokens"] * 2
    (row,) = server_rows(replace(recipe, urls=[router.process.url]))
    assert row.found == "a router, which takes no weights"
    assert all(url in row.fix for url in urls)
    stack.everywhere("/pause_generation", {"mode": "retract"})
    paused = [row.found for row in server_rows(recipe) if row.state == "problem"]
    assert paused == ["not ready: status 503"] * 2


@pytest.mark.parametrize(
    ("flags", "used"),
    [(("--cache-threshold", "0.8", "--balance-abs-threshold", "16"), 2), ((), 1)],
    ids=["as documented", "defaults"],
)
def test_cache_aware_keeps_the_responses_of_a_prompt_together(
    stack: Stack, flags: tuple[str, ...], used: int
) -> None:
    """Prompts that begin alike. The defaults send them all to one server, whichever took the first.

    The servers are told apart by a version that stands for them.
    """
    aware = stack.router("--policy", "cache_aware", *ALIVE, *flags)
    for number, server in enumerate(stack.servers, start=1):
        version = {"new_version": str(number), "abort_all_requests": False}
        server.must("/update_weight_version", version)
    rng = np.random.default_rng(0)
    begin = rng.integers(0, 48, 20).tolist()
    prompts = [begin + rng.integers(0, 48, 20).tolist() for _ in range(8)]
    asked = [request(f"g{g}-{k}", prompts[g], new=20) for g in range(8) for k in range(6)]
    answers = [future.result() for future in stack.send(aware, asked)]
    served = np.array([answer.versions_R[0] for answer in answers]).reshape(8, 6)
    assert (served == served[:, :1]).all()
    assert len(set(served[:, 0].tolist())) == used
    aware.process.stop(seconds=1)


def test_requests_of_a_dead_server_are_resampled_by_the_other(stack: Stack, router: Node) -> None:
    """The last test: afterwards there is one server."""
    asked = [request(f"d{number}", new=1000) for number in range(4)]
    running = stack.send_begun(router, asked)
    lost = stack.servers.pop()
    assert not any(future.done() for future in running)
    os.killpg(lost.process.process.pid, signal.SIGKILL)
    lost.process.stop()
    for one, future in zip(asked, running, strict=True):
        answer = future.result()
        assert len(answer.token_ids_R) == 1000
        assert_log_probs([stack.model], one, answer)
    wait_for(lambda: sorted(health(router)) == [False, True])
    for answer in stack.send(router, [request(f"e{number}") for number in range(6)]):
        assert len(answer.result().token_ids_R) == 12
