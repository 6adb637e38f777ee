"""A run with a registered loss and its settings, as a recipe gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import start_bapo

pytestmark = pytest.mark.e2e

RECIPE = """
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import AlgorithmConfig, EvaluationConfig, RolloutConfig, RunConfig, load_recipe

def recipe():
    demo = load_recipe(Path("recipes/demo_cpu.py"), RunConfig)
    algorithm = AlgorithmConfig(
        loss="cispo",
        loss_settings={"ratio_low": 0.9, "ratio_high": 1.1},
        reuse_epochs=2,
        updates_per_epoch=2,
    )
    rollout = RolloutConfig(
        prompts_per_step=4, group_size=4, max_response_tokens=32, drop_uniform_groups=False
    )
    optimizer = replace(demo.optimizer, lr=1e-3, warmup_updates=0)
    model = replace(demo.model, hf_path=Path("recipes/demo/policy"))  # its guesses are short
    demo = replace(demo, steps=2, model=model, rollout=rollout, evaluation=EvaluationConfig(every=0))
    return replace(demo, algorithm=algorithm, optimizer=optimizer)
"""


@pytest.mark.slow  # `make test` runs a user's loss with settings, by docs/extending.md
def test_a_run_with_a_named_loss(tmp_path: Path) -> None:
    """Metrics follow CISPO: its weights lie between the settings, and no search is logged."""
    recipe, run_dir = tmp_path / "cispo.py", tmp_path / "run"
    recipe.write_text(RECIPE)
    command = start_bapo("train", recipe, f"--run-dir={run_dir}")
    output, _ = command.communicate()
    assert command.returncode == 0, output.decode()[-3000:]
    updates = read_jsonl(run_dir / "updates.jsonl")
    assert [row["version"] for row in updates] == list(range(1, 9))
    assert all(0.9 <= row["cispo/weight"] <= 1.1 for row in updates)
    assert any(row["bapo/clip_fraction_high"] + row["bapo/clip_fraction_low"] > 0.1 for row in updates)
    assert not any(name.startswith(("contribution/", "bapo/clip_low")) for row in updates for name in row)
    stored = json.loads((run_dir / "config.json").read_text())["config"]
    assert stored["algorithm.loss_settings"] == {"ratio_low": 0.9, "ratio_high": 1.1}
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all("cispo/weight" in row for row in rows)
