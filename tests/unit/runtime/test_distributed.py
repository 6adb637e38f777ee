"""Who started this process: nobody, torchrun, or srun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.distributed import launched_world_size

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the test does to it
        monkeypatch.delenv(name)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Task 5 of 8 in a step on two nodes, and a scontrol that expands the node list."""
    variables = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "123456",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[07-08]" ] && printf "gpu07\\ngpu08\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_nobody() -> None:
    assert launched_world_size() is None


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN, ("3", "3", "4", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched_world_size() == 4


@pytest.mark.usefixtures("step")
def test_srun() -> None:
    assert launched_world_size() == 8
    assert [os.environ[name] for name in TORCHRUN] == ["5", "1", "8", "gpu07", "23456"]


@pytest.mark.usefixtures("step")
def test_srun_with_a_meeting_point_of_the_job_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4444")
    assert launched_world_size() == 8
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "4444")


def test_a_batch_script_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert launched_world_size() is None


def test_half_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"):
        launched_world_size()
