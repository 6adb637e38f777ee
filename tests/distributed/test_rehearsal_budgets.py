"""Budgets of the paper's recipes: a change that costs 2 GB of a GPU's memory or ten host waits fails here.

If a change is worth its price, put what the rehearsal finds into the table. The plan is held against the same
rehearsals.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.commands.plan.activations import kept
from bapo_megatron.commands.plan.job import Job, PlanOptions, find_shape
from bapo_megatron.commands.plan.memory import FIXED, host_bytes, stage_memory
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.hf.config import read_model_shape
from tests.support.forked_commands import start_bapo

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Budget:
    """What the first rank of a recipe takes, with Transformer Engine's layers."""

    update_gb: float
    save_gb: float
    waits: int


BUDGETS = {
    "bp_math_32b_64k": Budget(48.2, 30.9, 4),
    "bp_math_7b_64k": Budget(38.9, 17.3, 4),
    "r1_distill_qwen_7b_8k": Budget(48.5, 34.4, 4),
    "octothinker_llama_3b": Budget(23.4, 14.5, 4),
    "r1_distill_qwen_32b": Budget(57.3, 24.7, 20),
    "partial_rollout_7b": Budget(48.5, 34.4, 4),
}


@pytest.mark.parametrize("recipe", BUDGETS)
def test_a_recipe_stays_within_its_budget_and_the_plan_agrees(recipe: str, tmp_path: Path) -> None:
    budget, found = BUDGETS[recipe], rehearsed(recipe, tmp_path)
    peak_gb, kinds_gb = found["peak_gb"], found["ranks"][0]["kinds_gb"]["update 2"]
    assert found["misfits"] == []
    assert peak_gb["update 2"] < budget.update_gb + 2
    assert peak_gb["save"] < budget.save_gb + 2
    assert found["host_waits_per_update"] < budget.waits + 10
    plan_of = job(ROOT / f"recipes/{recipe}.py")
    plan = stage_memory(plan_of, 0)
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(plan, kind) == pytest.approx(1e9 * kinds_gb[kind], rel=0.001), kind
    assert plan.training - plan.reserve == pytest.approx(1e9 * peak_gb["update 2"], rel=0.03)
    assert plan.syncing - FIXED == pytest.approx(1e9 * peak_gb["weight sync"], rel=0.03)
    written = found["ranks"][0]["host_gb"]["save"] * 1e9 * plan_of.gpus_on_node
    assert 0.95 * written < host_bytes(plan_of) < 1.3 * written  # or one parameter more, the largest
    # The plan is of the rank that must join the largest parameter, the rehearsal of the first one.
    assert 1e9 * peak_gb["save"] < 1.01 * (plan.saving - FIXED) < 1.08e9 * peak_gb["save"]


LAYERS = [
    ("Qwen3-32B", "none", 8),
    ("Qwen3-32B", "selective", 8),
    ("DeepSeek-R1-Distill-Qwen-32B", "none", 1),
]


@pytest.mark.parametrize(("shape", "recompute", "context"), LAYERS)
def test_a_layer_keeps_what_the_plan_says(shape: str, recompute: Any, context: int, tmp_path: Path) -> None:
    """Bytes for each token, by which a model of eight layers keeps more than one of four."""
    path = ROOT / "recipes/bp_math_32b_64k.py"
    of_layers = json.loads((ROOT / f"recipes/shapes/{shape}/config.json").read_text())
    flags = ["--parallel.context", context, "--batch.recompute", recompute, "--model.hf-path", tmp_path]
    flags += ["--batch.pack-tokens", 8448 * context, "--rollout.max-response-tokens", 4096 * context]
    found = []
    for layers in (4, 8):
        (tmp_path / "config.json").write_text(json.dumps({**of_layers, "num_hidden_layers": layers}))
        [rank] = rehearsed("bp_math_32b_64k", tmp_path, *flags)["ranks"]
        found.append(1e9 * rank["kinds_gb"]["update 2"]["activations"])
    parallel = replace(load_recipe(path, RunConfig).parallel, context=context)
    planned = kept(read_model_shape(tmp_path), parallel, 2, recompute, "te").layer
    assert (found[1] - found[0]) / 4 / 8448 == pytest.approx(planned, rel=0.002)


def job(recipe: Path) -> Job:
    run = load_recipe(recipe, RunConfig)
    return Job(run, find_shape(recipe, run.model.hf_path), PlanOptions())


def rehearsed(recipe: str, folder: Path, *flags: object) -> dict[str, Any]:
    """The JSON of ``bapo rehearse``."""
    path = folder / "rehearsal.json"
    command = start_bapo("rehearse", f"recipes/{recipe}.py", "--layers", "te", "--json", path, *flags)
    said = command.communicate()[0].decode()
    assert command.wait() == 0, said
    found: dict[str, Any] = json.loads(path.read_text())
    return found
