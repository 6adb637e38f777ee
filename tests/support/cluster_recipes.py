"""The recipes for a cluster: all that are not demos, those of ``recipes/methods_7b_8k`` too."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "recipes"
_FILES = (*FOLDER.glob("*.py"), *FOLDER.glob("methods_7b_8k/*.py"))
CLUSTER_RECIPES = sorted(
    (path for path in _FILES if not path.stem.startswith("demo")), key=lambda path: path.stem
)


def cluster_recipe(name: str) -> Path:
    """The file of a recipe of this name."""
    [path] = (path for path in CLUSTER_RECIPES if path.stem == name)
    return path
