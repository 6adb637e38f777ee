"""A run with a user's loss, chosen by its dotted path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
RECIPE = """
from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bapo import fixed
from bapo_megatron.config import AlgorithmConfig, EvaluationConfig, RolloutConfig, RunConfig, load_recipe

def recipe():
    demo = load_recipe(Path("recipes/demo_cpu.py"), RunConfig)
    algorithm = AlgorithmConfig(
        loss="tests.support.cispo_loss:Cispo", bounds=fixed(0.9, 1.1), reuse_epochs=2, updates_per_epoch=2
    )
    rollout = RolloutConfig(
        prompts_per_step=4, group_size=4, max_response_tokens=32, drop_uniform_groups=False
    )
    optimizer = replace(demo.optimizer, lr=1e-3, warmup_updates=0)
    demo = replace(demo, steps=2, rollout=rollout, evaluation=EvaluationConfig(every=0))
    return replace(demo, algorithm=algorithm, optimizer=optimizer)
"""


@pytest.mark.slow  # docs/extending.md has the same in `make test`
def test_a_run_with_a_users_loss(tmp_path: Path) -> None:
    """Metrics follow CISPO: its factors lie between the bounds, and no search is logged."""
    recipe, run_dir = tmp_path / "cispo.py", tmp_path / "run"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "bapo_megatron.cli", "train", str(recipe), f"--run-dir={run_dir}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    updates = read_jsonl(run_dir / "updates.jsonl")
    assert [row["version"] for row in updates] == list(range(1, 9))
    assert all(0.9 <= row["cispo/factor"] <= 1.1 for row in updates)
    assert any(row["bapo/clip_fraction_high"] + row["bapo/clip_fraction_low"] > 0.1 for row in updates)
    assert not any(name.startswith(("contribution/", "bapo/clip_low")) for row in updates for name in row)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all("cispo/factor" in row for row in rows)
