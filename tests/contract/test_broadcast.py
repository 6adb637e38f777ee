"""Weight broadcasts to real SGLang servers: the weights in use afterwards, and the state after a failure."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts
from bapo_megatron.rollout.engines.requests import ModelLimits
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, ServerError, SglangServer
from bapo_megatron.rollout.engines.sglang.server_process import ServerProcess
from bapo_megatron.rollout.engines.weight_updates import BroadcastUpdates
from bapo_megatron.rollout.weight_sync.broadcast import BroadcastError, WeightBroadcast
from bapo_megatron.types import BucketSpec, GenerateRequest
from tests.support.fake_sglang import Keyless
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


class Present(SglangEngine):
    """An engine that takes part, whether or not its server runs."""

    async def is_alive(self) -> bool:
        return True


class Broadcasts:
    """A sender, and what receives from it: a pool of engines in a thread's event loop, as in a run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._sessions = self.wait(self._make_sessions())
        self._pools: list[EnginePool] = []
        self.sender = WeightBroadcast(torch.device("cpu"), bucket_mb=SMALL_MB, timeout_s=DEADLINE_S)

    def server(self, process: ServerProcess) -> SglangServer:
        return SglangServer(process.url, self._sessions, Keyless())

    def open(self, *processes: ServerProcess) -> None:
        """A new group with these servers."""
        self.updates = self.wait(self._receivers(processes))
        ranks, _ = self.wait(self.updates.gather())
        self.sender.open(ranks, lambda place: self.begin(self.updates.join(place)))

    def send(
        self,
        weights: list[tuple[str, Tensor]],
        version: int,
        at_bucket: Callable[[int], None] = lambda number: None,
        sent: SentDigests | None = None,
    ) -> None:
        """A whole update by broadcast."""
        buckets = count()

        def on_bucket(bucket: BucketSpec) -> Future[list[str]]:
            at_bucket(next(buckets))
            return self.begin(self.updates.receive(bucket))

        try:
            self.wait(self.updates.begin(version))
            self.sender.send(iter(weights), on_bucket)
            assert next(buckets) > 5
            self.wait(self.updates.confirm(sent))
            self.wait(self.updates.resume())
        except (BroadcastError, EngineError) as error:
            self.wait(self.updates.fail(str(error)))
            raise

    def assert_computes_with(
        self, folder: Path, process: ServerProcess, version: int, more: Sequence[GenerateRequest] = ()
    ) -> list[GenerateRequest]:
        """Check that log-probs equal those of Hugging Face's model in ``folder``, and the version.

        Returns the next segments of the answers, whose prefixes the server has in its cache.
        """
        server = self.server(process)
        assert self.wait(server.weight_version()) == version
        asked, answers = [*mixed_requests(5, temperature=0.6), *more], []
        for number, one in enumerate(asked):
            answer = self.wait(server.generate(one, f"{folder.name} {version} {number}"))
            assert set(answer.versions_R.tolist()) == {version}
            expected = reference_log_probs(folder, one, answer)
            np.testing.assert_allclose(answer.log_probs_R, expected, atol=TOLERANCE, rtol=0)
            answers.append(answer)
        return next_segments(asked, answers)

    def begin(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self.begin(call).result(timeout=600)

    def close(self) -> None:
        self.sender.close()
        for pool in self._pools:
            self.wait(pool.close())
        self.wait(self._sessions.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _make_sessions(self) -> HttpSessions:
        return HttpSessions()

    async def _receivers(self, processes: Sequence[ServerProcess]) -> BroadcastUpdates:
        limits = ModelLimits(SHAPE["vocab_size"], SHAPE["max_position_embeddings"])
        timeouts = EngineTimeouts(update_s=DEADLINE_S - 2)
        engines = [Present(self.server(one), limits, timeouts=timeouts) for one in processes]
        self._pools.append(EnginePool(engines, 8, lambda *_, **__: None))
        return BroadcastUpdates(self._pools[-1])


@pytest.fixture
def broadcasts() -> Iterator[Broadcasts]:
    found = Broadcasts()
    yield found
    found.close()


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen2"))
def test_a_server_computes_with_the_broadcast_weights(
    family: str, servers: Servers, make_model: MakeModel, broadcasts: Broadcasts
) -> None:
    process = servers.shared(make_model(family))
    broadcasts.open(process)
    segments: list[GenerateRequest] = []
    for version, seed in ((7, 1), (8, 2)):  # two updates in one group
        folder = make_model(family, seed)
        broadcasts.send(tensors(folder), version)
        segments = broadcasts.assert_computes_with(folder, process, version, segments)


def test_a_server_with_one_old_tensor_is_detected(
    servers: Servers, make_model: MakeModel, broadcasts: Broadcasts
) -> None:
    """A single server: there is no other digest to compare."""
    process = servers.shared(make_model("qwen2"))
    broadcasts.open(process)
    old, model = dict(tensors(make_model("qwen2", 1))), make_model("qwen2", 2)
    new = dict(tensors(model))
    sent = digests_of(new.items(), model)
    broadcasts.send([*new.items()], 1, sent=sent)
    kept = {**new, (name := "model.layers.0.mlp.up_proj.weight"): old[name]}
    with pytest.raises(EngineError, match=r"other values in model\.layers\.0\.mlp\.gate_up_proj\.weight on"):
        broadcasts.send([*kept.items()], 2, sent=sent)
    broadcasts.open(process)
    broadcasts.send([*new.items()], 3, sent=sent)


def test_a_request_in_flight_continues_under_new_weights(
    servers: Servers, make_model: MakeModel, broadcasts: Broadcasts
) -> None:
    """The engine pauses the server, which retracts what runs. Each token has its version and log-prob."""
    old, new = make_model("qwen2", 1), make_model("qwen2", 2)
    broadcasts.open(servers.shared(make_model("qwen2")))
    broadcasts.send(tensors(old), 1)
    asked = request(new=600, temperature=0.8)
    engine = broadcasts.updates._gathered[0][0].engine
    answer = broadcasts.begin(engine.generate(asked))
    for number in range(2):  # when the second is answered, tokens of the request in flight are sampled
        broadcasts.wait(engine.generate(request(f"probe {number}", new=5)))
    broadcasts.send(tensors(new), 2)
    found = answer.result(timeout=600)
    changed = int((found.versions_R == 1).sum())
    assert 0 < changed < 600
    assert found.versions_R.tolist() == [1] * changed + [2] * (600 - changed)
    by_old, by_new = (reference_log_probs(folder, asked, found) for folder in (old, new))
    expected = np.concatenate([by_old[:changed], by_new[changed:]])
    np.testing.assert_allclose(found.log_probs_R, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_a_server_that_stops_during_a_broadcast_is_reported(
    servers: Servers, make_model: MakeModel, broadcasts: Broadcasts
) -> None:
    """One that is killed: tests/distributed/test_weight_broadcast.py, and in a run test_chaos.py."""
    model, first, second = (make_model("qwen2", seed) for seed in (0, 1, 2))
    lost = servers.start(model)
    kept = servers.shared(model)
    lost.wait_ready()
    broadcasts.open(kept, lost)
    broadcasts.send(tensors(first), 1)  # which finds their digests equal
    for process in (kept, lost):
        broadcasts.assert_computes_with(first, process, 1)

    def lose(number: int) -> None:
        if number == 3:
            os.killpg(lost.process.pid, signal.SIGSTOP)  # the server and its workers

    start = time.monotonic()
    with pytest.raises(BroadcastError, match=lost.url):
        broadcasts.send(tensors(second), 2, lose)
    assert time.monotonic() - start < 20 * DEADLINE_S
    assert not broadcasts.sender.is_open

    lost.stop(seconds=1)
    broadcasts.open(kept)
    broadcasts.send(tensors(second), 3)
    broadcasts.assert_computes_with(second, kept, 3)


def test_a_failed_join_is_reported(servers: Servers, make_model: MakeModel, broadcasts: Broadcasts) -> None:
    """The group never forms; the waiting server is released, and joins the next group."""
    kept = servers.shared(make_model("qwen2"))
    gone = ServerProcess(["sleep", "0"], os.environ, "http://127.0.0.1:9", kept.log.with_name("gone.log"))
    with pytest.raises(BroadcastError, match=gone.url):
        broadcasts.open(kept, gone)
    broadcasts.open(kept)
    broadcasts.send(tensors(make_model("qwen2", 1)), 4)


def test_a_server_refuses_a_wrong_shape(
    servers: Servers, make_model: MakeModel, broadcasts: Broadcasts
) -> None:
    kept = servers.shared(make_model("qwen2"))
    broadcasts.open(kept)
    weights = tensors(make_model("qwen2", 1))
    wrong = [(name, tensor[:-1] if "down_proj" in name else tensor) for name, tensor in weights]
    with pytest.raises(BroadcastError, match=f"{kept.url}.*Failed to update parameter online"):
        broadcasts.send(wrong, 5)
    broadcasts.open(kept)
    broadcasts.send(weights, 6)


def test_a_server_refuses_a_bucket_without_an_open_update(
    servers: Servers, make_model: MakeModel, broadcasts: Broadcasts
) -> None:
    server = broadcasts.server(servers.shared(make_model("qwen2")))
    broadcasts.wait(server.end_update())  # there is none: nothing happens
    with pytest.raises(ServerError, match="must run between"):
        bucket = BucketSpec(("a",), ("float32",), ((1,),), 4)
        broadcasts.wait(server.receive(bucket, "no group", 5.0))
