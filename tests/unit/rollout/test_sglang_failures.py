"""Failures of SGLang servers (refusals, crashes, hangs, closed connections), played by a fake HTTP server."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from aiohttp import web
from safetensors.torch import load_file

from bapo_megatron.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, SglangConfig
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines import pool_state
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts
from bapo_megatron.rollout.engines.requests import ModelLimits, limits_of
from bapo_megatron.rollout.engines.sglang import http_client as http_server
from bapo_megatron.rollout.engines.sglang.backend import SglangBackend
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import (
    HttpSessions,
    PauseMode,
    ServerError,
    SglangServer,
)
from bapo_megatron.rollout.engines.sglang.requirements import drafting
from bapo_megatron.types import GenerateRequest, SamplingParams
from tests.contract.blocking import BlockingEngine
from tests.support.fake_sglang import FakeServer, Keyless
from tests.support.models import save_tiny_model

GZIP = {"Content-Encoding": "gzip"}
REQUEST = GenerateRequest("r", np.array([1, 2]), SamplingParams(1.0, 2, ()))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(http_server, "_CONTROL_S", 2.0)
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model("qwen2", tmp_path / "model")


@pytest.fixture
def engine(server: FakeServer, model: Path, tmp_path: Path) -> Iterator[BlockingEngine]:
    found = engine_on(server, model, tmp_path)
    yield found
    found.close()


def engine_on(
    server: FakeServer, model: Path, folder: Path, on_update: PauseMode = "retract"
) -> BlockingEngine:
    async def make() -> Engine:
        timeouts = EngineTimeouts(request_s=2.0, update_s=2.0, abort_s=0.5)
        return SglangEngine(
            SglangServer(server.url, HttpSessions(), Keyless()),
            limits_of(model),
            on_update,
            timeouts=timeouts,
        )

    return BlockingEngine(make, model, folder / "weights")


def weights(model: Path) -> Any:
    return load_file(model / "model.safetensors").items()


def test_idle_connections_are_dropped_before_the_server_closes_them(
    server: FakeServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client closes idle connections before the server does, after 5 s."""
    assert http_server._KEEP_IDLE_S < 4
    monkeypatch.setattr(http_server, "_KEEP_IDLE_S", 0.5)
    engine = engine_on(server, model, tmp_path)
    try:
        server.connections.clear()
        for pause_s in (0.0, 0.0, 1.5):
            time.sleep(pause_s)
            engine.generate([REQUEST])
        first, second, third = server.connections
        assert first == second != third
    finally:
        engine.close()


def test_a_request_on_a_closed_kept_connection_is_sent_once_more_on_a_new_one(
    server: FakeServer, engine: BlockingEngine
) -> None:
    """A proxy that drops connections drops all of them, or each after half an hour."""
    server.on_abort = [1] * 8
    engine.generate([REQUEST] * 8)  # all at once: eight connections are kept
    server.ended = set(server.connections)
    (answer,) = engine.generate([REQUEST])
    assert answer.token_ids_R.tolist() == [3, 4]
    assert len(set(server.rids)) == len(server.rids) == 10, "the server may still know the id of the ninth"
    engine.generate([REQUEST])
    server.rids.clear()
    server.cuts = 100
    with pytest.raises(ServerError, match="isconnected"):
        engine.generate([REQUEST])
    assert len(server.rids) == 2


def test_a_control_call_is_sent_once_over_a_new_connection(
    server: FakeServer, engine: BlockingEngine
) -> None:
    """Receiving a bucket or joining a group twice would hang."""
    engine.generate([REQUEST])
    kept = server.connections[-1]
    server.connections.clear()
    server.cut_path, server.cuts = "continue_generation", 1
    with pytest.raises(ServerError, match="isconnected"):
        engine.resume()
    assert server.cuts == 0
    assert kept not in server.connections
    assert len(set(server.connections)) == len(server.connections)


def test_an_answer_with_token_ids_outside_the_vocabulary_is_a_server_failure(
    server: FakeServer, engine: BlockingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake server's tokens are 3 and 4. A long answer is decoded in a thread."""
    monkeypatch.setattr(engine.engine, "_limits", ModelLimits(5, 64))
    engine.generate([REQUEST])
    monkeypatch.setattr(http_server, "_LONG_REPLY_BYTES", 1)
    engine.generate([REQUEST])
    monkeypatch.setattr(engine.engine, "_limits", ModelLimits(4, 64))
    with pytest.raises(ServerError, match="answers with token ids outside the vocabulary"):
        engine.generate([REQUEST])


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        ("generate", {"body": gzip.compress(bytes(64 << 20)), "headers": GZIP}, "no generation.*x1f"),
        ("generate", {"body": b" " * 300_000}, "its answer is longer than 200,000 bytes"),
        ("server_info", {"body": b"[" * 100_000}, "no JSON"),
    ],
)
def test_an_answer_that_would_fill_the_memory_is_refused(
    path: str,
    answer: dict[str, Any],
    says: str,
    server: FakeServer,
    engine: BlockingEngine,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a program on the address of a server: the limits hold before JSON is read."""
    monkeypatch.setattr(http_server, "_MOST_REPLY_BYTES", 200_000)
    server.raw[path] = web.Response(**answer)
    with pytest.raises(ServerError, match=f"{server.url}.*: {says}"):
        engine.generate([REQUEST]) if path == "generate" else engine.update_weights(weights(model), 5)


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        ("update_weights_from_disk", (500, {"message": "no space"}), "status 500.*no space"),
        (
            "update_weights_from_disk",
            (200, {"success": False, "message": "a shape"}),
            "were not loaded.*a shape",
        ),
        ("weights_checker", (200, {"success": False}), "no checksum of its weights"),
        ("model_info", (200, {"weight_version": "4"}), "reports weight version 4 after a load of 5"),
        ("model_info", (200, {"weight_version": "default"}), "start it with --weight-version 0"),
    ],
)
def test_a_failed_update_is_reported(
    path: str, answer: tuple[int, Any], says: str, server: FakeServer, engine: BlockingEngine, model: Path
) -> None:
    server.answers[path] = answer
    with pytest.raises(ServerError, match=says):
        engine.update_weights(weights(model), 5)
    server.answers.clear()
    engine.update_weights(weights(model), 6)
    assert engine.generate([REQUEST])[0].versions_R.tolist() == [6, 6]


@pytest.mark.parametrize("path", ["update_weights_from_disk", "pause_generation"])
def test_a_server_that_hangs_has_a_deadline(
    path: str, server: FakeServer, engine: BlockingEngine, model: Path
) -> None:
    server.hangs = {path}
    with pytest.raises(ServerError, match=rf"{server.url}/{path}: no answer within 2(\.0\d*)? s"):
        engine.update_weights(weights(model), 5)
    server.hangs = set()


def test_a_load_may_take_as_long_as_a_slow_disk_takes_for_its_bytes(
    server: FakeServer, engine: BlockingEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load takes 3 s; 2 s are allowed beside the time for its bytes. A request that is overdue meanwhile
    is aborted afterwards: a paused server answers no abort."""
    nbytes = sum(tensor.nbytes for _, tensor in weights(model))
    monkeypatch.setattr(pool_state, "LEAST_BYTES_PER_S", nbytes / 60)
    server.on_abort = [1]
    running = engine.begin([REQUEST])
    while not server.rids:
        time.sleep(0.01)
    server.hangs = {"update_weights_from_disk"}
    engine.update_weights(weights(model), 5)
    assert engine.weight_version == 5
    assert [answer.token_ids_R.tolist() for answer in running.result(20)] == [[3]]


def test_an_unanswered_abort_is_a_server_failure(server: FakeServer, engine: BlockingEngine) -> None:
    server.hangs = {"generate"}
    with pytest.raises(ServerError, match=r"no answer within 2 s, nor to an abort within 0.5 s"):
        engine.generate([REQUEST])


def test_a_server_without_tokens_for_any_request_fails(server: FakeServer, engine: BlockingEngine) -> None:
    """A single request may have waited in its queue, behind others that got tokens."""
    for tokens in (0, 1, 0):
        server.on_abort = [tokens]
        assert len(engine.generate([REQUEST])[0].token_ids_R) == tokens
    server.on_abort = [0]
    with pytest.raises(ServerError, match="no token for any request within 2 s"):
        engine.generate([REQUEST])


SOUND = {"disable_radix_cache": True, "disable_overlap_schedule": True}
SOUND |= {"hicache_storage_backend": None, "enable_lmcache": False, "enable_flexkv": False}


@pytest.mark.parametrize(
    ("on_update", "field", "value", "says"),
    [
        ("in_place", "disable_radix_cache", False, "start it with --disable-radix-cache .*on_update=in_pla"),
        ("retract", "hicache_storage_backend", "file", "start it without --hicache-storage-backend: .* of e"),
        ("retract", "enable_lmcache", True, "start it without --enable-lmcache"),
    ],
)
def test_a_server_that_would_sample_with_keys_of_old_weights_takes_no_new_ones(
    on_update: PauseMode, field: str, value: Any, says: str, server: FakeServer, model: Path, tmp_path: Path
) -> None:
    """Checked before a weight load, for servers that the run has not started: a flush leaves what lies
    outside of the server, or what the overlap has scheduled."""
    server.answers["server_info"] = (200, {**SOUND, field: value})
    engine = engine_on(server, model, tmp_path, on_update)
    try:
        with pytest.raises(ServerError, match=f"{server.url}: {says}"):
            engine.update_weights(weights(model), 5)
        assert server.version == "0"
        server.answers["server_info"] = (200, SOUND)
        engine.update_weights(weights(model), 5)
        assert server.version == "5"
    finally:
        engine.close()


def test_a_draft_model_gets_new_weights_from_disk_alone(
    server: FakeServer, engine: BlockingEngine, model: Path, tmp_path: Path
) -> None:
    """Of a server that the run has not started, too, and at the first load, which is from disk before the
    first step. Drafts by n-grams have no weights."""
    sglang = SglangConfig(urls=(server.url,), sync="broadcast")
    rollout = RolloutConfig(engine="sglang", sglang=sglang)
    run = RunConfig("x", ModelConfig(model), DataConfig(model), rollout=rollout, run_dir=tmp_path / "run")

    async def load_first() -> None:
        async with AsyncExitStack() as opened:
            [one] = await SglangBackend().open(run, [server.url], "cpu", opened)
            await one.load(model, 0, confirm=AsyncMock())

    server.answers["server_info"] = (200, {"speculative_algorithm": "EAGLE"})
    with pytest.raises(ServerError, match=f"{server.url}: its draft model .* EAGLE.*sync=disk"):
        asyncio.run(load_first())
    engine.update_weights(weights(model), 5)
    assert server.version == "5"
    assert drafting({"speculative_algorithm": "NGRAM"}) is drafting({"speculative_algorithm": None}) is None
