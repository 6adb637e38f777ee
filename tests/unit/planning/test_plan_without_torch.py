"""``bapo plan`` of every recipe, loss and preset, where torch cannot be imported: a plan is arithmetic."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.algo import bapo
from bapo_megatron.algo.losses import LOSSES, build_loss, load_loss
from bapo_megatron.algo.registered_losses import measures_ratio, searches_update
from bapo_megatron.commands.recipe_flags import check_names
from bapo_megatron.config import AlgorithmConfig, RunConfig, load_recipe
from bapo_megatron.errors import ConfigError

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("a plan imported torch", name="torch")

sys.meta_path.insert(0, Blocked())
from bapo_megatron.cli import run
for line in sys.argv[1:]:
    code = run(["plan", *line.split()])
    assert code in (0, 1), (line, code)
assert "torch" not in sys.modules
"""


def test_recipes_are_planned_without_torch() -> None:
    recipes = sorted([*ROOT.glob("recipes/*.py"), *ROOT.glob("recipes/methods_7b_8k/*.py")])
    # The model of these is a package that `make real-model` fetches: not everywhere. A loss of one's own is
    # imported, with what it imports.
    left_out = ("__init__", "demo_agent", "demo_real", "demo_real_tools", "r1_distill_qwen_7b_8k_own_method")
    recipes = [path for path in recipes if path.stem not in left_out]
    assert len(recipes) > 20
    ended = planned(list(map(str, recipes)))
    assert ended.stdout.count("Engines: ") >= len(recipes) - 5


PRESETS = {
    "paper": bapo.paper(),
    "balanced": bapo.balanced(),
    "clip_higher": bapo.clip_higher(),
    "eq8_literal": bapo.eq8_literal(),
    "fixed": bapo.fixed(0.8, 1.3),
    "grpo": bapo.grpo(),
    "published_code": bapo.published_code(),
}
RECIPE = """
from dataclasses import replace

from bapo_megatron.algo import bapo
from recipes import demo_cpu


def recipe():
    run = demo_cpu.recipe()
    return replace(run, algorithm=replace(run.algorithm, bounds=bapo.{preset}))
"""


def test_every_loss_and_every_preset_is_planned_without_torch(tmp_path: Path) -> None:
    """Held forward passes, too. Settings of a loss are declared with it, with torch: that is said."""
    lines = [f"recipes/demo_cpu.py --algorithm.loss={name}" for name in sorted(LOSSES)]
    lines.append("recipes/demo_cpu.py --algorithm.loss=gspo --batch.hold-forwards")
    lines.append('recipes/demo_cpu.py --algorithm.loss=sapo --algorithm.loss-settings={"anything":1}')
    for preset in PRESETS:
        path = tmp_path / f"{preset}.py"
        path.write_text(RECIPE.format(preset=f"{preset}(0.8, 1.3)" if preset == "fixed" else f"{preset}()"))
        lines.append(str(path))
    ended = planned(lines)
    assert ended.stdout.count("Engines: ") == len(lines)
    assert ended.stderr.count("algorithm.loss_settings are not checked: torch is not installed here") == 1


@pytest.mark.parametrize(
    "algorithm",
    [
        *(AlgorithmConfig(loss=name) for name in sorted(LOSSES)),
        *(AlgorithmConfig(bounds=preset) for preset in PRESETS.values()),
    ],
)
def test_what_is_known_of_a_loss_without_torch_is_what_its_class_says(algorithm: AlgorithmConfig) -> None:
    search = build_loss(algorithm).search
    reads = "searched" if algorithm.loss == "clip" else "unused"
    assert load_loss(algorithm.loss).bounds == reads  # type: ignore[attr-defined]
    assert measures_ratio(algorithm) == (search is not None and search.is_ratio)
    assert searches_update(algorithm) == (
        search is not None and search.known is None and search.scope == "update"
    )


def test_a_plan_refuses_bounds_that_a_loss_does_not_read() -> None:
    run = load_recipe(ROOT / "recipes/demo_cpu.py", RunConfig)
    others = replace(run, algorithm=AlgorithmConfig(loss="cispo", bounds=bapo.BoundsConfig(target=0.5)))
    with pytest.raises(ConfigError, match=r"target=0\.5: algorithm\.loss=cispo does not read that"):
        check_names(others)


def planned(lines: list[str]) -> subprocess.CompletedProcess[str]:
    """The plans of recipes with flags, one after the other in a process without torch."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *lines], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended
