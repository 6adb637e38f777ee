"""The registry of rollout backends, and the engine-independent settings."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config import DataConfig, EngineConfig, ModelConfig, RolloutConfig, RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.interfaces import Confirm, Engine
from bapo_megatron.rollout.engines.backend import EngineBackend, engine_backend
from bapo_megatron.rollout.engines.colocated_pool import open_pool
from bapo_megatron.rollout.weight_sync.broadcast import sender_address
from tests.support.sampling import ScriptedEngine, mixed


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("vllm", r"rollout.engine='vllm' is unknown: give local, sglang, or the path of a subclass"),
        ("no_such_module:Backend", r"rollout.engine=no_such_module:Backend: importing no_such_module failed"),
        ("tests.support.plain_engine:PlainEngine", "PlainEngine.* is not a subclass of EngineBackend"),
        ("tests.support.plain_engine:Nothing", "tests.support.plain_engine has no class Nothing"),
    ],
)
def test_an_unknown_backend_is_refused(engine: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_backend(engine)


class DiskEngine(ScriptedEngine):
    """A user's engine that takes weights from a folder alone, also after its sleep."""

    async def release_memory(self) -> None: ...
    async def wake(self, folder: Path, version: int, confirm: Confirm) -> None: ...


class DiskBackend(EngineBackend):
    async def open(self, *_: Any) -> list[Engine]:
        return [DiskEngine(mixed)]


class SleeplessBackend(EngineBackend):
    async def open(self, *_: Any) -> list[Engine]:
        return [ScriptedEngine(mixed)]


@pytest.mark.parametrize(
    ("backend", "settings", "says"),
    [
        ("DiskBackend", {"sync": "broadcast"}, r"DiskEngine.transports .*\(interfaces.ReceivesBroadcast\)"),
        (
            "DiskBackend",
            {"sync": "ipc", "colocated": True},
            r"sync=ipc: .*WeightParts \(interfaces.ReceivesH",
        ),
        ("SleeplessBackend", {"colocated": True}, "cannot release their memory .*leave colocated out"),
    ],
)
async def test_engines_that_cannot_do_what_the_recipe_asks_are_refused(
    backend: str, settings: dict[str, Any], says: str
) -> None:
    rollout = RolloutConfig(engine=f"{__name__}:{backend}", custom_engine=EngineConfig(**settings))
    run = RunConfig("test", ModelConfig(Path("model")), DataConfig(Path("data")), rollout=rollout)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=says):
            await open_pool(run, (), "cpu", lambda *_, **__: None, stack)


def test_the_address_of_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node3")
    here, away = "http://localhost:1", "http://node7:2"
    assert sender_address(EngineConfig()) == "127.0.0.1"  # servers of the run's own
    assert sender_address(EngineConfig(urls=(here, "http://127.0.0.1:5"))) == "127.0.0.1"
    assert sender_address(EngineConfig(urls=(here, away))) == "node3"
    assert sender_address(EngineConfig(urls=(here,), address="10.0.0.1")) == "10.0.0.1"
