"""The shell library of slurm/lib, as a job's script sources it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.executables import executable

SLURM = Path(__file__).parents[3] / "slurm"
NO_PAUSES = "sleep() { :; }\n"
"""Put before lines that would look ten times, a second apart, for a node that is down."""
Shell = Callable[..., subprocess.CompletedProcess[str]]


def program(name: str) -> ModuleType:
    """A program of slurm/, none of which is a part of the package, as a module."""
    spec = importlib.util.spec_from_file_location(f"slurm_{name}", SLURM / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint(run: Path, step: int, whole: bool = True, update: int | None = None) -> None:
    within = "" if update is None else f"_update_{update:03d}"
    folder = run / f"checkpoints/step_{step:06d}{within}"
    folder.mkdir(parents=True)
    if whole:
        (folder / "manifest.json").write_text("{}")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs lines of bash after the library, in job 7 whose run is ``tmp_path``."""
    for name, text in (("squeue", "echo RUNNING"), ("sinfo", "true"), ("scontrol", "exit 1")):
        executable(tmp_path / "bin" / name, text)

    def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "BAPO_ROOT": str(tmp_path),
            **variables,
        }
        begin = f". {SLURM}/lib/job.sh\nBAPO_RUN={tmp_path} BAPO_LOGS={tmp_path} BAPO_END=0 BAPO_EXPECTED=0\n"
        return subprocess.run(
            ["bash", "-u", "-c", begin + script], env=environment, capture_output=True, text=True, timeout=300
        )

    return run
