"""`make gpu-check`: the whole program on a GPU, and all of it but the kernels where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapo_megatron.commands.plan.hardware import GB
from bapo_megatron.config import BatchConfig, RunConfig
from bapo_megatron.config.recipe import load_recipe
from benchmarks.gpu import phases
from benchmarks.gpu.memory_and_speed import LIMIT, predicted
from benchmarks.gpu.rows import Row, Size

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


def test_the_plan_of_a_gpu_is_not_that_of_a_cpus_layers(tmp_path: Path) -> None:
    """Without Transformer Engine, too: with torch's layers on a GPU this shape was rehearsed at 71.9 GB.
    Those of a CPU, whose norms and SwiGLU are not fused, would keep a third more."""
    size = Size("cuda")
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocab,
        "max_position_embeddings": size.pack,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = BatchConfig(pack_tokens=size.pack, recompute="none")
    on_gpu, on_cpu = (
        predicted(tmp_path, batch, replace(size, device=device)) / GB for device in ("cuda", "cpu")
    )
    assert abs(71.9 / on_gpu - 1) < LIMIT / 3
    assert abs(71.9 / on_cpu - 1) > LIMIT


def test_a_phase_is_judged_by_its_rehearsal() -> None:
    assert phases.judged("update 1", 50.0, 48.0, tiny=False).ok is True  # within 5 % and 0.5 GB: 2.9
    assert phases.judged("update 1", 51.0, 48.0, tiny=False).ok is False
    assert phases.judged("update 1", 45.0, 48.0, tiny=False).ok is False
    assert phases.judged("update 1", 51.0, 48.0, tiny=True).ok is None


def test_the_rehearsal_is_asked_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its JSON has the peaks by phase; a command that fails is told, not passed over."""
    (tmp_path / "policy").mkdir()

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        assert command[3:5] == ["rehearse", str(tmp_path / "phases.py")]
        flags = dict(zip(command[5::2], command[6::2], strict=True))
        assert (flags["--layers"], flags["--packs"]) == ("torch", "1")
        Path(flags["--json"]).write_text(json.dumps({"peak_gb": {"build": 0.25}}))
        return SimpleNamespace(stdout="fits", stderr="")

    monkeypatch.setattr(phases, "subprocess", SimpleNamespace(run=run, TimeoutExpired=TimeoutError))
    (row,) = phases.rows(Size.smallest("cpu"), tmp_path)
    assert row.line() == "| build | rehearsed 0.250 GB; nothing to measure on a CPU |  |  |"
    recipe = load_recipe(tmp_path / "phases.py", RunConfig)
    recipe.check()
    assert (recipe.batch.pack_tokens, recipe.model.dtype) == (256, "bfloat16")
    failing = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout="", stderr="x\nerror: no"))
    failing.TimeoutExpired = TimeoutError
    monkeypatch.setattr(phases, "subprocess", failing)
    (tmp_path / "phases.json").unlink()
    (row,) = phases.rows(replace(Size.smallest("cpu"), device="cuda"), tmp_path)
    assert (row.measured, row.ok) == ("error: no", False)
