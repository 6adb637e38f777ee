"""``bapo plan`` of every recipe, where torch cannot be imported: a plan is arithmetic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("a plan imported torch")

sys.meta_path.insert(0, Blocked())
from bapo_megatron.cli import run
for recipe in sys.argv[1:]:
    code = run(["plan", recipe])
    assert code in (0, 1), (recipe, code)
assert "torch" not in sys.modules
"""


def test_recipes_are_planned_without_torch() -> None:
    recipes = sorted([*ROOT.glob("recipes/*.py"), *ROOT.glob("recipes/methods_7b_8k/*.py")])
    # demo_real's model is a package that `make real-model` fetches: not everywhere.
    recipes = [path for path in recipes if path.name != "__init__.py" and "demo_real" not in path.name]
    assert len(recipes) > 20
    command = [sys.executable, "-c", SCRIPT, *map(str, recipes)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("Engines: ") >= len(recipes) - 5
