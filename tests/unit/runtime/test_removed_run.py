"""A run directory that is removed under its run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.commands.train import _run_lock
from bapo_megatron.errors import RunStopped


@pytest.mark.parametrize("rank", [0, 1])
def test_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr("bapo_megatron.runtime.distributed.is_main", lambda: rank == 0)
    config: Any = SimpleNamespace(directory=tmp_path / "run")
    config.directory.mkdir()
    with pytest.raises(OSError, match="of another folder"), _run_lock(config):
        raise OSError("of another folder")
    with (
        pytest.raises(RunStopped, match=r"run was removed or moved while the run used it"),
        _run_lock(config),
    ):
        shutil.rmtree(config.directory)
        (config.directory / "journal").open("w")
