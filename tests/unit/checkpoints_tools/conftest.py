"""Fixtures: conversions of a small random model in every direction."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints_tools import Settings, reshard, to_hf, to_megatron
from tests.support.checkpoint_models import save_random_model

OVERWRITE = Settings(overwrite=True)
Convert = Callable[[Path, Settings], object]


def in_a_child(work: Callable[[], object]) -> int:
    """The wait status of a forked process that does ``work``."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "megatron"
    to_megatron(model, path)
    return path


RUN_FILES = {"policy/.metadata": b"metadata", "policy/__0_0.distcp": bytes(3_000_000), "trainer.json": b"{}"}


def make_step(run: Path, step: int) -> Path:
    """A checkpoint of a run, as far as the names, sizes and digests of its files go."""
    folder = run / f"checkpoints/step_{step:06d}"
    (folder / "policy").mkdir(parents=True)
    for name, data in RUN_FILES.items():
        (folder / name).write_bytes(data)
    entries = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in RUN_FILES.items()
    }
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": entries}))
    return folder


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Three layers of ``tmp_path/hf``, each matrix in two chunks."""
    save_random_model(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "torch_dist", grid=2)
    return tmp_path / "torch_dist/release"


@pytest.fixture(params=["to_megatron", "to_hf", "reshard"])
def convert(request: pytest.FixtureRequest, model: Path, checkpoint: Path) -> Convert:
    conversions: dict[str, Convert] = {
        "to_megatron": lambda output, settings: to_megatron(model, output, settings=settings),
        "to_hf": lambda output, settings: to_hf(checkpoint, output, settings=settings),
        "reshard": lambda output, settings: reshard(checkpoint, output, grid=3, settings=settings),
    }
    return conversions[request.param]
