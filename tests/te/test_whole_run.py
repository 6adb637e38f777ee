"""The demo recipe on Transformer Engine's layers against the same run on torch's layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_rehearsal.te_sources import te_version
from tests.support.forked_commands import ROOT
from tests.support.metrics import results
from tests.support.short_runs import SHORT, SUMS, exported

FLAGS = [SUMS, *(flag for flag in SHORT if not flag.startswith("--steps")), "--steps=2"]


@pytest.mark.slow
@pytest.mark.e2e
def test_the_demo_trains_as_on_torch_layers(whole: Path, tmp_path: Path) -> None:
    """The first update is on equal rollouts; later ones are not, since weights differ in the last bits."""
    ours, counts = tmp_path / "te", tmp_path / "counts.json"
    words = ["train", "recipes/demo_cpu.py", *FLAGS, f"--run-dir={ours}"]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.support.te_bapo",
        te_version(),
        str(counts),
        *words,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    [first, *_], [expected, *_] = (results(run, "updates.jsonl") for run in (ours, whole))
    for name in ("policy/entropy", "policy/grad_norm", "policy/loss", "bapo/contribution"):
        assert first[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    calls = json.loads(counts.read_text())
    assert calls["fused_attn_bwd"]
    assert calls["multi_tensor_adam"]
    assert (ours / "checkpoints/step_000002/manifest.json").is_file()
    assert exported(ours).keys() == exported(whole).keys()
