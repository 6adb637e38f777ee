"""Weight broadcasts to real SGLang servers: the weights in use afterwards, and the state after a failure."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.requests import ModelLimits
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.rollout.engines.sglang.engine import Deadlines, SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, ServerError, SglangServer
from bapo_megatron.rollout.engines.sglang.server_process import ServerProcess
from bapo_megatron.rollout.engines.weight_updates import BroadcastUpdates
from bapo_megatron.rollout.weight_sync.broadcast import BroadcastError, WeightBroadcast
from bapo_megatron.types import BucketSpec, GenerateRequest
from tests.support.tiers import slow_but

from .conftest import FAMILIES, SHAPE, Servers
from .references import mixed_requests, next_segments, reference_log_probs, request, tensors
from .test_sent_digests import digests_of

T = TypeVar("T")
MakeModel = Callable[..., Path]

TOLERANCE = 1e-4
"""Natural log; float32 on both sides."""

DEADLINE_S = 10.0
SMALL_MB = 0.01
"""10,485 bytes: these models make about nine buckets, and the embedding of some is nearly one."""


class Calls:
    """Runs calls to servers in a thread's event loop, as the caller of a broadcast must."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._sessions = self.wait(self._make_sessions())

    def server(self, process: ServerProcess) -> SglangServer:
        return SglangServer(process.url, self._sessions)

    def begin(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self.begin(call).result(timeout=600)

    def close(self) -> None:
        self.wait(self._sessions.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _make_sessions(self) -> HttpSessions:
        return HttpSessions()


@pytest.fixture
def calls() -> Iterator[Calls]:
    found = Calls()
    yield found
    found.close()


@pytest.fixture
def sender() -> Iterator[WeightBroadcast]:
    found = WeightBroadcast(torch.device("cpu"), bucket_mb=SMALL_MB, timeout_s=DEADLINE_S)
    yield found
    found.close()


class Present(SglangEngine):
    """An engine that takes part, whether or not its server runs."""

    async def is_alive(self) -> bool:
        return True


@pytest.fixture
def receivers(calls: Calls) -> Iterator[Callable[..., BroadcastUpdates]]:
    pools: list[EnginePool] = []

    async def make(processes: Sequence[ServerProcess]) -> BroadcastUpdates:
        limits = ModelLimits(SHAPE["vocab_size"], SHAPE["max_position_embeddings"])
        deadlines = Deadlines(update_s=DEADLINE_S - 2)
        engines = [Present(calls.server(one), limits, deadlines=deadlines) for one in processes]
        pools.append(EnginePool(engines, 8, lambda *_, **__: None))
        return BroadcastUpdates(pools[-1])

    yield lambda *processes: calls.wait(make(processes))
    for pool in pools:
        calls.wait(pool.close())


def open_group(sender: WeightBroadcast, updates: BroadcastUpdates, calls: Calls) -> None:
    ranks, _ = calls.wait(updates.gather())
    sender.open(ranks, lambda place: calls.begin(updates.join(place)))


def send(
    sender: WeightBroadcast,
    updates: BroadcastUpdates,
    calls: Calls,
    weights: list[tuple[str, Tensor]],
    version: int,
    at_bucket: Callable[[int], None] = lambda number: None,
    sent: SentDigests | None = None,
) -> None:
    """A whole update by broadcast."""
    number = 0

    def on_bucket(bucket: BucketSpec) -> Future[list[str]]:
        nonlocal number
        at_bucket(number)
        number += 1
        return calls.begin(updates.receive(bucket))

    try:
        calls.wait(updates.begin(version))
        assert sender.send(iter(weights), on_bucket) == sum(tensor.nbytes for _, tensor in weights)
        assert number > 5
        calls.wait(updates.confirm(sent))
        calls.wait(updates.resume())
    except (BroadcastError, EngineError) as error:
        calls.wait(updates.fail(str(error)))
        raise


def assert_computes_with(
    folder: Path, server: SglangServer, calls: Calls, version: int, more: Sequence[GenerateRequest] = ()
) -> list[GenerateRequest]:
    """Check that log-probs equal those of Hugging Face's model in ``folder``, and the version.

    Returns the next segments of the answers, whose prefixes the server has in its cache.
    """
    assert calls.wait(server.weight_version()) == version
    asked, answers = [*mixed_requests(5, temperature=0.6), *more], []
    for number, one in enumerate(asked):
        answer = calls.wait(server.generate(one, f"{folder.name} {version} {number}"))
        assert set(answer.versions_R.tolist()) == {version}
        expected = reference_log_probs(folder, one, answer)
        np.testing.assert_allclose(answer.log_probs_R, expected, atol=TOLERANCE, rtol=0)
        answers.append(answer)
    return next_segments(asked, answers)


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen2"))
def test_a_server_computes_with_the_broadcast_weights(
    family: str,
    servers: Servers,
    make_model: MakeModel,
    sender: WeightBroadcast,
    receivers: Callable[..., BroadcastUpdates],
    calls: Calls,
) -> None:
    process = servers.shared(make_model(family))
    taking, server = receivers(process), calls.server(process)
    open_group(sender, taking, calls)
    segments: list[GenerateRequest] = []
    for version, seed in ((7, 1), (8, 2)):  # two updates in one group
        folder = make_model(family, seed)
        send(sender, taking, calls, tensors(folder), version)
        segments = assert_computes_with(folder, server, calls, version, segments)


def test_the_digest_detects_one_changed_element(
    servers: Servers,
    make_model: MakeModel,
    sender: WeightBroadcast,
    receivers: Callable[..., BroadcastUpdates],
    calls: Calls,
) -> None:
    process = servers.shared(make_model("qwen2"))
    taking, server = receivers(process), calls.server(process)
    open_group(sender, taking, calls)
    weights = tensors(make_model("qwen2", 1))
    element = dict(weights)["model.layers.1.mlp.down_proj.weight"][3]
    digests = []
    for version, towards in ((1, None), (2, 9.0), (3, -9.0)):
        if towards is not None:
            element[5] = torch.nextafter(element[5], torch.tensor(towards))
        send(sender, taking, calls, weights, version)
        digests.append(calls.wait(server.checksum(600.0)))
    assert digests[0] == digests[2] != digests[1]


def test_a_server_with_one_old_tensor_is_detected(
    servers: Servers,
    make_model: MakeModel,
    sender: WeightBroadcast,
    receivers: Callable[..., BroadcastUpdates],
    calls: Calls,
) -> None:
    """A single server: there is no other digest to compare."""
    taking = receivers(servers.shared(make_model("qwen2")))
    open_group(sender, taking, calls)
    old, model = dict(tensors(make_model("qwen2", 1))), make_model("qwen2", 2)
    new = dict(tensors(model))
    sent = digests_of(new.items(), model)
    send(sender, taking, calls, [*new.items()], 1, sent=sent)
    kept = {**new, (name := "model.layers.0.mlp.up_proj.weight"): old[name]}
    with pytest.raises(EngineError, match=r"other values in model\.layers\.0\.mlp\.gate_up_proj\.weight on"):
        send(sender, taking, calls, [*kept.items()], 2, sent=sent)
    open_group(sender, taking, calls)
    send(sender, taking, calls, [*new.items()], 3, sent=sent)


def test_a_request_in_flight_continues_under_new_weights(
    servers: Servers,
    make_model: MakeModel,
    sender: WeightBroadcast,
    receivers: Callable[..., BroadcastUpdates],
    calls: Calls,
) -> None:
    """The engine pauses the server, which retracts what runs. Each token has its version and log-prob."""
    old, new = make_model("qwen2", 1), make_model("qwen2", 2)
    process = servers.shared(make_model("qwen2"))
    taking = receivers(process)
    open_group(sender, taking, calls)
    send(sender, taking, calls, tensors(old), 1)
    asked = request(new=600, temperature=0.8)
    engine = taking._gathered[0][0].engine
    answer = calls.begin(engine.generate(asked))
    for number in range(2):  # when the second is answered, tokens of the request in flight are sampled
        calls.wait(engine.generate(request(f"probe {number}", new=5)))
    send(sender, taking, calls, tensors(new), 2)
    found = answer.result(timeout=600)
    changed = int((found.versions_R == 1).sum())
    assert 0 < changed < 600
    assert found.versions_R.tolist() == [1] * changed + [2] * (600 - changed)
    by_old, by_new = (reference_log_probs(folder, asked, found) for folder in (old, new))
    expected = np.concatenate([by_old[:changed], by_new[changed:]])
    np.testing.assert_allclose(found.log_probs_R, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_a_server_that_stops_during_a_broadcast_is_reported(
    servers: Servers,
    make_model: MakeModel,
    sender: WeightBroadcast,
    receivers: Callable[..., BroadcastUpdates],
    calls: Calls,
) -> None:
    """One that is killed: tests/distributed/test_weight_broadcast.py, and in a run test_chaos.py."""
    model, first, second = (make_model("qwen2", seed) for seed in (0, 1, 2))
    lost = servers.start(model)
    kept = servers.shared(model)
    lost.wait_ready()
    both = receivers(kept, lost)
    open_group(sender, both, calls)
    send(sender, both, calls, tensors(first), 1)  # which finds their digests equal
    for process in (kept, lost):
        assert_computes_with(first, calls.server(process), calls, 1)

    def lose(number: int) -> None:
        if number == 3:
            os.killpg(lost.process.pid, signal.SIGSTOP)  # the server and its workers

    start = time.monotonic()
    with pytest.raises(BroadcastError, match=lost.url):
        send(sender, both, calls, tensors(second), 2, lose)
    assert time.monotonic() - start < 20 * DEADLINE_S
    assert not sender.is_open

    lost.stop(seconds=1)
    rest = receivers(kept)
    open_group(sender, rest, calls)
    send(sender, rest, calls, tensors(second), 3)
    assert_computes_with(second, calls.server(kept), calls, 3)


def test_a_failed_join_is_reported(
    servers: Servers,
    make_model: MakeModel,
    sender: WeightBroadcast,
    receivers: Callable[..., BroadcastUpdates],
    calls: Calls,
) -> None:
    """The group never forms; the waiting server is released, and joins the next group."""
    kept = servers.shared(make_model("qwen2"))
    gone = ServerProcess(["sleep", "0"], os.environ, "http://127.0.0.1:9", kept.log.with_name("gone.log"))
    with pytest.raises(BroadcastError, match=gone.url):
        open_group(sender, receivers(kept, gone), calls)
    alone = receivers(kept)
    open_group(sender, alone, calls)
    send(sender, alone, calls, tensors(make_model("qwen2", 1)), 4)


def test_a_server_refuses_a_wrong_shape(
    servers: Servers,
    make_model: MakeModel,
    sender: WeightBroadcast,
    receivers: Callable[..., BroadcastUpdates],
    calls: Calls,
) -> None:
    kept = servers.shared(make_model("qwen2"))
    taking = receivers(kept)
    open_group(sender, taking, calls)
    weights = tensors(make_model("qwen2", 1))
    wrong = [(name, tensor[:-1] if "down_proj" in name else tensor) for name, tensor in weights]
    with pytest.raises(BroadcastError, match=f"{kept.url}.*Failed to update parameter online"):
        send(sender, taking, calls, wrong, 5)
    open_group(sender, taking, calls)
    send(sender, taking, calls, weights, 6)


def test_a_server_refuses_a_bucket_without_an_open_update(
    servers: Servers, make_model: MakeModel, calls: Calls
) -> None:
    server = calls.server(servers.shared(make_model("qwen2")))
    calls.wait(server.end_update())  # there is none: nothing happens
    with pytest.raises(ServerError, match="must run between"):
        calls.wait(server.receive(BucketSpec(("a",), ("float32",), ((1,),), 4), "no group", 5.0))
