"""Budgets of the paper's recipes: a change that costs 2 GB of a GPU's memory or ten host waits fails here.

If a change is worth its price, put what the rehearsal finds into the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_commands import start_bapo

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

# Torch's layers, one pack (a pipeline one more than its stages): GB of an update and of a save, and waits.
BUDGETS = {
    "bp_math_32b_64k": (50.09, 65.66, 941),
}


@pytest.mark.parametrize("recipe", BUDGETS)
def test_a_recipe_stays_within_its_budget(recipe: str, tmp_path: Path) -> None:
    update, save, waits = BUDGETS[recipe]
    found = rehearsed(recipe, tmp_path)
    assert found["misfits"] == []
    assert found["peak_gb"]["update 2"] == pytest.approx(update, abs=2)
    assert found["peak_gb"]["save"] == pytest.approx(save, abs=2)
    assert found["host_waits_per_update"] < waits + 10


def rehearsed(recipe: str, folder: Path) -> dict[str, Any]:
    """The JSON of ``bapo rehearse``."""
    path = folder / "rehearsal.json"
    start_bapo("rehearse", f"recipes/{recipe}.py", "--layers", "torch", "--json", str(path)).wait()
    found: dict[str, Any] = json.loads(path.read_text())
    return found
