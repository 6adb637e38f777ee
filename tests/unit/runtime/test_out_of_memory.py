"""A rank that has no memory left says so, and no rank waits for one that was killed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.guards import OutOfMemoryError, death, naming_memory

ROOT = Path(__file__).parents[3]
RUN = """
import os, resource, signal, sys, time
import torch, torch.distributed as dist
from bapo_megatron.runtime import distributed
from bapo_megatron.runtime.distributed import process_group, run_processes
from bapo_megatron.runtime.guards import naming_memory

def worker():
    with naming_memory(), process_group("gloo", 60):
        dist.barrier()
        if os.environ["RANK"] == "1":
            {harm}
        time.sleep(3600)  # as NCCL does while it waits for a rank that is gone

if __name__ == "__main__":
    distributed._GRACE_S = 0.5  # for the rank that sleeps, and would not end by itself
    run_processes(worker, (), 2, heeding={heeding})
"""
SHORT = """resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); torch.zeros(2**40)"""


def run(harm: str, heeding: bool = False) -> tuple[int, str]:
    """Exit code and stderr of two ranks, of which the second comes to harm."""
    command = [sys.executable, "-c", RUN.format(harm=harm, heeding=heeding)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    return done.returncode, done.stderr


def test_a_gpu_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    told = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 3 has 1.1 GiB free."
    with pytest.raises(OutOfMemoryError) as caught, naming_memory():
        raise torch.OutOfMemoryError(told)
    said = str(caught.value)
    assert said.startswith(
        f"rank 5 on {socket.gethostname()} has no GPU memory left; a smaller batch.pack_tokens"
    )
    assert "batch.recompute=full" in said
    assert said.endswith(": CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has 1.1 GiB free.")
    assert str(caught.value.__cause__) == told


@pytest.mark.parametrize("words", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "NCCL: CUDA out of memory"])
def test_libraries_of_cuda(words: str) -> None:
    with pytest.raises(OutOfMemoryError, match="no GPU memory left"), naming_memory():
        raise RuntimeError(words)


def test_a_machine_without_memory() -> None:
    for ask in (lambda: torch.zeros(2**50), lambda: bytearray(2**60)):
        with pytest.raises(OutOfMemoryError, match="has no memory left; fewer processes"), naming_memory():
            ask()


@pytest.mark.parametrize("error", [RuntimeError("shape"), ConfigError("out of memory"), OSError(28, "full")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_memory():
        raise error
    assert caught.value is error


def test_how_a_process_ended() -> None:
    assert death(3) == "exit code 3"
    assert death(-signal.SIGKILL).startswith(
        "killed by SIGKILL, most likely because the machine had no memory"
    )
    assert death(-signal.SIGSEGV) == "killed by SIGSEGV"


def test_a_rank_whose_allocation_fails_ends_the_others() -> None:
    code, said = run(SHORT)
    assert code == 1, said
    assert f"OutOfMemoryError: rank 1 on {socket.gethostname()} has no memory left" in said
    assert "allocate memory" in said.splitlines()[-1] + said.splitlines()[-2]


def test_a_rank_that_is_killed_ends_the_others() -> None:
    code, said = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 128 + signal.SIGKILL, said
    assert said.splitlines()[-1].startswith(
        "error: rank 1 was killed by SIGKILL, most likely because the machine"
    )


@pytest.mark.parametrize("heeding", [True, False])
def test_a_rank_that_a_signal_to_stop_ends(heeding: bool) -> None:
    """One of a run was still starting: it heeds them later. A warm start's, which never does, was killed."""
    code, said = run("os.kill(os.getpid(), signal.SIGTERM)", heeding)
    expected = (
        (85, "stopped: told to stop before the run began") if heeding else (143, "rank 1 was killed by")
    )
    assert code == expected[0], said
    assert expected[1] in said.splitlines()[-1]
