"""A real SGLang server on a model that ``bapo-ckpt`` has exported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.requests import limits_of
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, SglangServer
from bapo_megatron.runtime.distributed import free_port
from checkpoints_tools import to_hf, to_megatron

from .blocking import BlockingEngine
from .conftest import Servers
from .references import assert_from_model, mixed_requests

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "127.0.0.1",
}


@pytest.mark.slow
def test_a_server_on_an_export_samples_from_the_original_model(
    servers: Servers, make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through Megatron's format and back, in several files; transformers has the model as it was.

    The server starts in the environment of a trainer whose agent, torchrun, keeps the store: a server that
    joined that one would wait there for ever.
    """
    model = make_model("qwen3", seed=7)
    carried = tmp_path / "model"
    shutil.copytree(model, carried)
    to_megatron(carried, tmp_path / "megatron")
    shutil.rmtree(carried)  # so that nothing can come from there
    to_hf(tmp_path / "megatron", tmp_path / "export", shard_bytes=20_000)
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1

    with monkeypatch.context() as launched:
        for name, value in {**TORCHRUN, "MASTER_PORT": str(free_port())}.items():
            launched.setenv(name, value)
        server = servers.start(tmp_path / "export")
    server.wait_ready()

    async def make() -> Engine:
        return SglangEngine(SglangServer(server.url, HttpSessions()), limits_of(model))

    engine = BlockingEngine(make, model, tmp_path / "weights")
    try:
        asked = mixed_requests(14)
        assert_from_model(model, asked, engine.generate(asked))
    finally:
        engine.close()
        server.stop(seconds=1)
