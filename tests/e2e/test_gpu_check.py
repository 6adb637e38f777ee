"""`make gpu-check`: the whole program on a GPU, and all of it but the kernels where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.rows import Row

ROOT = Path(__file__).parents[2]
SECTIONS = 8


def gpu_check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.e2e
def test_without_a_gpu_all_but_the_kernels_runs() -> None:
    done = gpu_check("--device", "cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n## ") == SECTIONS
    assert "| float32: gradient norm | 0.00e+00 |" in done.stdout  # against itself
    assert "recompute full: speed" in done.stdout
    assert "recompute none: bounds search" in done.stdout
    assert "torch: weights of a Hugging Face folder, in and out | 51 of 51 equal" in done.stdout
    assert "| T 0.6: float32 logits, the servers' flag |" in done.stdout
    assert "\n## Memory by phase against the rehearsal\n" in done.stdout
    assert done.stdout.endswith("every check held\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert done.stderr.endswith("no CUDA device\n--device cpu runs what needs none, at tiny size\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    done = gpu_check("--quick")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_row_says_whether_its_check_held() -> None:
    assert Row("a", "1", "2", True).line() == "| a | 1 | 2 | ok |"
    assert Row("a", "3", "2", False).line() == "| a | 3 | 2 | FAILED |"
    assert Row("a", "3").line() == "| a | 3 |  |  |"
