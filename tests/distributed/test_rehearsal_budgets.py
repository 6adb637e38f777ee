"""Budgets of the paper's recipes: a change that costs 2 GB of a GPU's memory or ten host waits fails here.

If a change is worth its price, put what the rehearsal finds into the table. The plan is held against the same
rehearsals.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.commands.plan.job import Job, PlanOptions, find_shape
from bapo_megatron.commands.plan.memory import FIXED, StageMemory, stage_memory
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from tests.support.forked_commands import start_bapo

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Budget:
    """What the first rank of a recipe may take, with torch's layers and one pack."""

    update_gb: float
    save_gb: float
    waits: int


BUDGETS = {
    "bp_math_32b_64k": Budget(50.1, 65.7, 941),
    "bp_math_7b_64k": Budget(39.0, 34.4, 606),
}


@pytest.mark.parametrize("recipe", BUDGETS)
def test_a_recipe_stays_within_its_budget_and_the_plan_agrees(recipe: str, tmp_path: Path) -> None:
    budget, found = BUDGETS[recipe], rehearsed(recipe, tmp_path)
    peak_gb, kinds_gb = found["peak_gb"], found["ranks"][0]["kinds_gb"]["update 2"]
    assert found["misfits"] == []
    assert peak_gb["update 2"] < budget.update_gb + 2
    assert peak_gb["save"] < budget.save_gb + 2
    assert found["host_waits_per_update"] < budget.waits + 10
    plan = planned(ROOT / f"recipes/{recipe}.py")
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(plan, kind) == pytest.approx(1e9 * kinds_gb[kind], rel=0.001), kind
    # The plan is of Transformer Engine's layers, which keep a little less than torch's.
    assert plan.training - plan.reserve == pytest.approx(1e9 * peak_gb["update 2"], rel=0.03)
    assert plan.saving - FIXED == pytest.approx(1e9 * peak_gb["save"], rel=0.03)


def planned(recipe: Path) -> StageMemory:
    """The plan of the first stage."""
    run = load_recipe(recipe, RunConfig)
    return stage_memory(Job(run, find_shape(recipe, run.model.hf_path), PlanOptions()), 0)


def rehearsed(recipe: str, folder: Path) -> dict[str, Any]:
    """The JSON of ``bapo rehearse``."""
    path = folder / "rehearsal.json"
    command = start_bapo("rehearse", f"recipes/{recipe}.py", "--layers", "torch", "--json", path)
    said = command.communicate()[0].decode()
    assert command.wait() == 0, said
    found: dict[str, Any] = json.loads(path.read_text())
    return found
