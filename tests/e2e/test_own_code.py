"""A run of a user's own engine that a recipe names. (Losses, rewards and more: test_extending.py.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import start_bapo

pytestmark = pytest.mark.e2e

ENGINE_RECIPE = """
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import EvaluationConfig, RunConfig, load_recipe
from tests.support.plain_engine import PlainConfig


def recipe() -> RunConfig:
    run = load_recipe(Path("recipes/demo_cpu.py"), RunConfig)
    rollout = replace(
        run.rollout,
        prompts_per_step=2,
        group_size=4,
        max_response_tokens=12,
        drop_uniform_groups=False,
        engine="tests.support.plain_engine:PlainBackend",
        custom_engine=PlainConfig(),
    )
    algorithm = replace(run.algorithm, updates_per_epoch=2)
    model = replace(run.model, hf_path=Path("recipes/demo/policy"))  # its guesses are short
    evaluation = EvaluationConfig()
    return replace(run, steps=3, model=model, rollout=rollout, algorithm=algorithm, evaluation=evaluation)
"""


@pytest.mark.slow
def test_the_demo_with_an_engine_of_its_own(tmp_path: Path) -> None:
    recipe, run_dir = tmp_path / "recipe.py", tmp_path / "run"
    recipe.write_text(ENGINE_RECIPE)
    flags = ["--run-dir", str(run_dir), "--rollout.custom-engine.copies=2"]
    command = start_bapo("train", recipe, *flags)
    output, _ = command.communicate(timeout=400)
    assert command.returncode == 0, output.decode()[-3000:]
    rows = list(read_jsonl(run_dir / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {row["sampler/engines"] for row in rows} == {2.0}
    # Engine and trainer compute the same log-probs, so the weights of every step have reached the engines.
    assert max(row["rollout/engine_gap_max"] for row in rows) < 1e-4
    assert rows[-1]["staleness/max"] < 4, "a response was sampled by older weights than its step's"
    config = json.loads((run_dir / "config.json").read_text())["config"]
    assert config["rollout.engine"] == "tests.support.plain_engine:PlainBackend"
    assert config["rollout.custom_engine.copies"] == 2
