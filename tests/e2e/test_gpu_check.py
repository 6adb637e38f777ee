"""`make gpu-check`: the whole program on a GPU, and all of it but the kernels where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.config import BatchConfig, ParallelConfig
from bapo_megatron.planning.job import GB
from benchmarks import gpu_check as program
from benchmarks.gpu import experts, phases, server
from benchmarks.gpu.memory_and_speed import LIMIT, predicted
from benchmarks.gpu.rows import Row, Size
from tests.support.forked_commands import ROOT, forking
from tests.support.workers import run_layout

SECTIONS = 14


def gpu_check(*flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.slow
@pytest.mark.e2e
def test_without_a_gpu_all_but_the_kernels_runs() -> None:
    done = gpu_check("--device", "cpu", environment=forking())
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n## ") == SECTIONS
    for line in (
        "| float32: gradient norm | 0.00e+00 |",  # against itself
        "recompute full: speed",
        "recompute none: bounds search",
        "torch: weights of a Hugging Face folder, in and out | 51 of 51 equal",
        "torch's experts: weights of a Hugging Face folder, in and out | 135 of 135 equal",
        "| torch's experts in bfloat16 against torch's in float32: log-probs |",
        "| T 0.6: float32 logits, the servers' flag |",
        "\n## Memory by phase against the rehearsal\n",
        "| 2: back again | digests of weights, masters and moments equal | bit by bit | ok |",
        "| a frozen reference takes turns | the reference's digests equal, the policy's are as before |",
        "| weights by shared memory | 27 of 27 tensors in 8 buckets",
        "| weights on the device are the host's masters, rounded | 0 of 17 parameters differ |",
    ):
        assert line in done.stdout
    assert ("not run: no interpreter at" in done.stdout) or (
        f"| {server.STEPS} steps of bapo train | exit code 0 |" in done.stdout
        and "| memory changes hands | " in done.stdout
    )
    assert done.stdout.endswith("every check held\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "prepare_device", lambda: None)  # its variables are for a process of its own
    assert program.main([]) == 2
    said = capsys.readouterr().err
    assert said.endswith("no CUDA device\n--device cpu runs what needs none, at tiny size\n")


def test_the_allocators_settings_are_there_before_torch_is_imported(tmp_path: Path) -> None:
    """They are read once, when CUDA starts: beside flash-attn in Transformer Engine's import."""
    told = "import os, sys; print(os.environ.get('PYTORCH_ALLOC_CONF')); sys.exit(0)"
    (tmp_path / "torch.py").write_text(told)
    command = [sys.executable, "-m", "benchmarks.gpu_check"]
    plain = {
        k: v for k, v in os.environ.items() if k not in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    environment = plain | {"PYTHONPATH": str(tmp_path), "BAPO_DEVICE": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout == "expandable_segments:True\n", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    done = gpu_check("--quick")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


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


def yields_then_raises(_size: Size, _folder: Path) -> Iterator[Row]:
    yield Row("first", "1", "2", True)
    raise RuntimeError("CUDA error: no kernel image\nand a page of advice")


def test_a_section_that_raises_does_not_cost_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row says why; its rows so far and the next section's are kept, row by row."""
    sections = [
        program.Section("Broken", yields_then_raises, 1),
        program.Section("Next", lambda *_: iter([Row("there", "3", "4", True)]), 1),
    ]
    kept: list[int] = []

    def keeps(found: program.Found) -> None:
        kept.append(sum(len(rows) for rows in found.values()))
        program.keep(tmp_path, found)

    found = program.run_sections(sections, replace(Size.smallest("cpu"), tiny=False), tmp_path, keeps)
    assert kept == [1, 2, 3, 4, 5]
    assert [row.line() for row in found["Broken"][:2]] == [
        "| first | 1 | 2 | ok |",
        "| the section | RuntimeError: CUDA error: no kernel image | no exception | FAILED |",
    ]
    assert found["Next"][0].ok is True
    assert "and a page of advice" in capsys.readouterr().err  # the traceback
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [row["name"] for row in written["Broken"]] == ["first", "the section", "time"]
    assert "| there | 3 | 4 | ok |" in (tmp_path / "gpu_check.md").read_text()


def rows_of_experts(name: str | None) -> list[tuple[str, bool | None]]:
    """The rows of the experts' section, where the bfloat16 policy has one expert that gives nothing."""
    build = experts.build

    def broken(dtype: Any, recompute: Any) -> Any:
        policy = build(dtype, recompute)
        for (own, layer), parameter in policy._weights.local.items():
            if dtype == "bfloat16" and layer == 1 and name is not None and own.endswith(name):
                parameter.data.zero_()
        return policy

    experts.build = broken  # type: ignore[assignment]
    return [(row.name, row.ok) for row in experts.rows(Size.smallest("cpu"), Path())]


@pytest.mark.distributed
@pytest.mark.parametrize("name", [None, "experts.5.linear_fc2.weight"])
def test_a_wrong_expert_fails_the_check(name: str | None) -> None:
    [found] = run_layout(rows_of_experts, ParallelConfig(), name)
    failed = [row for row, is_ok in found if not is_ok]
    assert len(found) == 4
    if name is None:
        assert failed == []
    else:
        assert [row.partition(": ")[2] for row in failed] == [
            "weights of a Hugging Face folder, in and out",
            "log-probs",
            "gradient norm",
        ]


def test_a_run_that_hangs_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the ends of its logs, whose folder is temporary, are printed."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import time\ntime.sleep(10**6)\n")
    log = tmp_path / "run/logs/server-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("ninja: build stopped\n")
    assert server.run(recipe, tmp_path, 0.5).startswith("killed after 0.5 s: ")
    assert "--- server-0.log\nninja: build stopped\n" in capsys.readouterr().err


def test_what_a_servers_run_recorded_is_judged(tmp_path: Path) -> None:
    """The gap after a wake with old weights, a step that is missing, updates that moved nothing, trouble."""

    def judged(gaps: list[float], moved: float | None, *kinds: str) -> list[bool | None]:
        steps = [
            {"step": 1 + n, "rollout/engine_gap_mean": gap, "time/wake_s": 2.0} for n, gap in enumerate(gaps)
        ]
        updates = [{"step": 1, "policy/ratio_gap": moved}]
        events = [{"kind": one} for one in kinds]
        for name, rows in {"metrics": steps, "updates": updates, "events": events}.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return [row.ok for row in server.judged(tmp_path, "bfloat16")]

    assert judged([1e-3, 2e-3, 3e-3], 0.5, "start") == [True] * 5
    assert judged([1e-3, 0.3, 3e-3], 0.5) == [True, False, True, True, True]
    assert judged([1e-3], 0.5) == [True, False, False, True, True]
    assert judged([1e-3, 2e-3, 3e-3], 0.05) == [True, True, True, False, True]
    assert judged([1e-3, 2e-3, 3e-3], None) == [True, True, True, False, True]  # an update with NaN
    assert judged([1e-3, 2e-3, 3e-3], 0.5, "memory_kept") == [True, True, True, True, False]
    assert [row.ok for row in server.judged(tmp_path / "none", "bfloat16")] == [False] * 5
