"""A real SGLang server on a model that ``bapo-ckpt`` has exported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints_tools import to_hf, to_megatron

from .conftest import Servers, engine_on
from .references import assert_from_model, mixed_requests


@pytest.mark.slow
def test_a_server_on_an_export_samples_from_the_original_model(
    servers: Servers, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Through Megatron's format and back, in several files; transformers has the model as it was."""
    model = make_model("qwen3", seed=7)
    carried = tmp_path / "model"
    shutil.copytree(model, carried)
    to_megatron(carried, tmp_path / "megatron")
    shutil.rmtree(carried)  # so that nothing can come from there
    to_hf(tmp_path / "megatron", tmp_path / "export", shard_bytes=20_000)
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1

    server = servers.start(tmp_path / "export")
    server.wait_ready()
    engine = engine_on(server.url, model, tmp_path / "weights")
    try:
        asked = mixed_requests(14)
        assert_from_model(model, asked, engine.generate(asked))
    finally:
        engine.close()
        server.stop(seconds=1)
