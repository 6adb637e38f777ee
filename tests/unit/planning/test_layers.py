"""Search for Transformer Engine's sources, and torch's layers when it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.rehearsal.transformer_engine import VERSIONS, find_sources

ROOT = Path(__file__).parents[3]


def install(folder: Path, version: str) -> None:
    """A package transformer_engine whose import ends in an error, as without its libraries."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine/__init__.py").write_text("raise RuntimeError('compiled for a GPU')")
    metadata = folder / f"transformer_engine-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n"
    )


@pytest.mark.parametrize(
    ("version", "found"), [(VERSIONS[0], True), (f"{VERSIONS[0]}+cu13", True), ("2.10.0", False)]
)
def test_sources_of_the_installed_package(
    version: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BAPO_TE_SOURCES", str(tmp_path / "none"))
    if found:
        assert find_sources(VERSIONS[0]) == tmp_path
    else:
        with pytest.raises(ConfigError, match="and it is not installed: run `make te-sources`"):
            find_sources(VERSIONS[0])


TORCH_LAYERS = """
import torch
from bapo_megatron.planning.rehearsal.job import prepare_layers

prepare_layers("torch")
from bapo_megatron.policy import device

device.has_cuda = lambda: True
print(device.uses_transformer_engine(torch.bfloat16))
"""


@pytest.mark.integration
def test_torch_layers_are_used_although_transformer_engine_is_installed(tmp_path: Path) -> None:
    install(tmp_path, VERSIONS[0])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", TORCH_LAYERS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr
