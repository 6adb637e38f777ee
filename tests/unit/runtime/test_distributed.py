"""Who started this process: nobody, torchrun, or srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.distributed import launched_world_size

ROOT = Path(__file__).parents[3]
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


RANKS = """
import os, signal, sys, time
from bapo_megatron.runtime.distributed import run_processes
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
def worker():
    print(os.getpid(), flush=True)
    time.sleep(1000)
run_processes(worker, (), 2)
"""


def test_ranks_end_with_the_command_also_where_ctrl_c_is_ignored() -> None:
    command = [sys.executable, "-c", RANKS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
    try:
        psutil.wait_procs(ranks, timeout=60)
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
