"""The launcher of `bapo submit`: what it leaves on disk, with a stand-in for NeMo-Run."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[3] / "slurm/launch.py"


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """slurm/launch.py, which runs where NeMo-Run is and is no part of the package."""
    for name in ("nemo_run", "nemo_run.core", "nemo_run.core.execution", "nemo_run.core.execution.slurm"):
        part: Any = ModuleType(name)
        part.SlurmBatchRequest = part.SlurmExecutor = part.SlurmJobDetails = object
        monkeypatch.setitem(sys.modules, name, part)
    spec = importlib.util.spec_from_file_location("slurm_launch", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_of_a_job_is_readable_by_its_user_alone(
    launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster file's [environment], with its tokens, is in it, on a file system that all share."""
    (tmp_path / "logs").mkdir()
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\ngrep -q TOKEN "$2" && echo 4711\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(launch, "script_of", lambda job: "export HF_TOKEN=hf_secret\n")
    monkeypatch.setattr(sys, "argv", ["launch.py"])
    path = tmp_path / "logs/submitted.sbatch"
    path.write_text("that of an earlier version, which others may read\n")
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"run": str(tmp_path)})))
        launch.main()
        assert path.read_text() == "export HF_TOKEN=hf_secret\n"
        assert path.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out == "4711\n4711\n"


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("4711\n", "4711"),
        ("4711;cluster\n", "4711"),
        ("Welcome.\nA project: 12 hours\n\n4711\n", "4711"),
    ],
)
def test_the_number_of_a_job_is_found_after_a_sites_own_words(
    launch: ModuleType, said: str, number: str
) -> None:
    assert launch.job_number(said) == number


def test_a_submission_without_a_number_is_an_error(launch: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"named no job; `squeue --me` shows .*: held for review"):
        launch.job_number("held for review\n")
