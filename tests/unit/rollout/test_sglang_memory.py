"""The order in which a server releases and gets back its memory and weights, played by a small HTTP server.

What a real CPU server does is in tests/contract/test_released_memory.py.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, call

import pytest
from safetensors.torch import load_file

from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts
from bapo_megatron.rollout.engines.requests import limits_of
from bapo_megatron.rollout.engines.sent_weights import DigestMismatch
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, SglangServer
from bapo_megatron.types import BroadcastGroup, BucketSpec, WeightPart
from tests.support.fake_sglang import FakeServer, Keyless
from tests.support.models import SingleWriter, save_tiny_model

ALL = {"weights", "cuda_graph", "kv_cache"}


class SleepingServer(FakeServer):
    """A fake server with SGLang 0.5.23's tagged memory: it crashes where SGLang does."""

    def __init__(self) -> None:
        self.tags = set(ALL)
        """Memory tags that are resident."""
        self.weights = "0"
        """The actual weights, whatever version is reported."""
        self.loads_nothing = False
        """Whether loads are acknowledged, but not made."""
        self.updates = False
        """Whether a weight update is open."""
        self.dead: str | None = None
        """Why the server crashed; empty while it runs."""
        self.calls: list[str] = []
        super().__init__()

    def _ends(self, path: str, body: dict[str, Any]) -> bool:
        self.dead = self.dead or self._died(path, body)
        if self.dead:
            return True
        if path not in ("model_info", "server_info"):
            self.calls.append(" ".join([path, *sorted(body.get("tags", []))]))
        if path == "release_memory_occupation":
            self.tags -= set(body["tags"])
            self.weights = "unset"
        if path == "resume_memory_occupation":
            self.tags |= set(body["tags"])
        if path == "update_weights_from_disk" and not self.loads_nothing:
            self.weights = body["weight_version"]
        if path == "update_weights_from_tensor" and not self.loads_nothing:
            self.weights = base64.b64decode(body["serialized_named_tensors"][0]).decode()
        if path == "update_weight_version":
            self.version = body["new_version"]
        if path in ("begin_weight_update", "end_weight_update"):
            begins = path == "begin_weight_update"
            self.answers.pop(path, None)
            if begins == self.updates:  # status 400, as in SGLang
                self.answers[path] = (400, {"message": "no weight-update session is open"})
            self.updates = begins
        return False

    def _died(self, path: str, body: dict[str, Any]) -> str | None:
        tags = set(body.get("tags", []))
        if path == "release_memory_occupation" and not self.paused:
            return "released while it was not idle"
        if path == "resume_memory_occupation" and tags & self.tags:
            return f"resumed {sorted(tags & self.tags)}, which was there"
        needs = ("update_weights_from_disk", "update_weights_from_tensor", "weights_checker")
        if path in needs and "weights" not in self.tags:
            return f"{path} without memory for weights"
        if path in ("generate", "flush_cache") or body.get("flush_cache"):
            return None if self.tags >= ALL else f"{path} without {sorted(ALL - self.tags)}"
        return None

    def _answer(self, path: str, tokens: int = 2, reason: str = "length") -> Any:
        if path == "weights_checker":
            return {"per_engine_checksum": f"of {self.weights}"}
        return super()._answer(path, tokens, reason)


@pytest.fixture
def server() -> Iterator[SleepingServer]:
    found = SleepingServer()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen2", tmp_path_factory.mktemp("m") / "model")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    weights = load_file(model / "model.safetensors").items()
    return SingleWriter(tmp_path / "weights", model).write(weights, 7)


def engine_on(server: SleepingServer, model: Path) -> SglangEngine:
    timeouts = EngineTimeouts(request_s=30.0, update_s=30.0, abort_s=5.0)
    client = SglangServer(server.url, HttpSessions(), Keyless())
    return SglangEngine(client, limits_of(model), timeouts=timeouts)


async def wake_by_handles(engine: SglangEngine, confirm: Confirm) -> None:
    async def parts() -> AsyncIterator[WeightPart]:
        for _ in range(2):
            yield [b"7"]

    await engine.wake(parts(), 7, confirm)


LOADS = {
    "folder": ["update_weights_from_disk"],
    "handles": [
        *("end_weight_update", "begin_weight_update", *["update_weights_from_tensor"] * 2),
        *("end_weight_update", "update_weight_version"),
    ],
}


@pytest.mark.parametrize("way", LOADS)
async def test_the_order_of_calls_in_a_release_and_wake(
    server: SleepingServer, model: Path, folder: Path, way: str
) -> None:
    """An update that a failure has left open is ended first."""
    confirm, engine = AsyncMock(), engine_on(server, model)
    await engine.release_memory()
    assert server.tags == set()
    assert await engine.is_alive()
    server.updates = True
    await (engine.wake(folder, 7, confirm) if way == "folder" else wake_by_handles(engine, confirm))
    assert (server.dead, server.tags) == (None, ALL)
    assert server.calls == [
        *("abort_request", "pause_generation", "release_memory_occupation cuda_graph kv_cache weights"),
        *("resume_memory_occupation cuda_graph weights", *LOADS[way], "weights_checker"),
        *("resume_memory_occupation kv_cache", "continue_generation"),
    ]
    assert await engine.weight_version() == 7
    assert confirm.await_args_list == [call("of 7")]


class Letter:
    """A part of a transport of a user's own (docs/sglang.md)."""

    async def send(self, server: SglangServer, timeout_s: float) -> None:
        await server.load_part("/read_letter", {"tensor": "w"}, timeout_s)


async def test_the_order_of_calls_in_a_broadcast(server: SleepingServer, model: Path) -> None:
    """The version is set, and sampling resumes, after the digest was compared."""
    group = BroadcastGroup("127.0.0.1", 1234, "weights", 2, "gloo")

    async def parts() -> AsyncIterator[WeightPart]:
        for _ in range(2):
            yield BucketSpec(("w",), ("float32",), ((1,),), 4)
        yield Letter()

    async def confirm(digest: str) -> None:
        server.calls.append(f"confirm {digest}")

    engine = engine_on(server, model)
    await engine.leave_group(group.name)
    await engine.join_group(group, 1)
    for left_open in (False, True):
        server.updates = left_open
        await engine.load(parts(), 7, confirm)
    once = [
        *("abort_request", "pause_generation", "end_weight_update", "begin_weight_update"),
        *["update_weights_from_distributed"] * 2,
        *("read_letter", "end_weight_update", "flush_cache", "weights_checker", "confirm of 0"),
        *("update_weight_version", "continue_generation"),
    ]
    join = ["destroy_weights_update_group", "init_weights_update_group"]
    assert server.calls == [*join, *once, *once]


@pytest.mark.parametrize("by_handles", [True, False])
async def test_nothing_is_sampled_from_weights_that_are_not_confirmed(
    server: SleepingServer, model: Path, folder: Path, by_handles: bool
) -> None:
    """The resumed memory is undefined, here of a server that has not read what it got."""

    async def refuse(digest: str) -> None:
        raise DigestMismatch(digest)

    server.loads_nothing = True
    engine = engine_on(server, model)
    await engine.release_memory()
    with pytest.raises(DigestMismatch, match="of unset"):
        await (wake_by_handles(engine, refuse) if by_handles else engine.wake(folder, 7, refuse))
    assert "continue_generation" not in server.calls
    assert "kv_cache" not in server.tags
