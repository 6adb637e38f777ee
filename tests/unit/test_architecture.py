"""Imports run one way. The rules are in docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bapo_megatron"

# Lower layers first; a module may import from its own layer and from those before it.
LAYERS = [
    {"types", "errors", "files", "mkl"},
    {"algo"},
    {"config", "config_checks", "config_sglang"},
    {"interfaces", "distributed", "named_weights"},
    {"data", "reward"},
    {"rollout", "policy", "sync", "state"},
    {"progress", "report", "report_data", "report_panels", "report_plots", "recipe", "plan"},
    {"record", "clipping", "old_log_probs", "alarm"},
    {"build", "sft"},
    {"preflight", "train"},
    {"finish", "verify", "doctor", "cluster"},
    {"cli"},
]
SIBLINGS = ("rollout", "policy", "sync", "state")
MEGATRON_ALLOWED = ("policy", "state")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The module or subpackage directly under the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def project_parts(path: Path) -> set[str]:
    names = [name.split(".") for name in imports(path) if name.startswith("bapo_megatron.")]
    return {name[1] for name in names} - {"__version__"}


def layer_of(name: str) -> int:
    for number, layer in enumerate(LAYERS):
        if name in layer:
            return number
    raise AssertionError(f"{name} is in no layer: add it to LAYERS and to docs/architecture.md")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = part(path)
    if own == "__init__":
        return
    for other in project_parts(path):
        assert layer_of(other) <= layer_of(own), f"{path.name} imports {other}, which is above it"
        if own in SIBLINGS and other in SIBLINGS:
            assert own == other, f"{own} imports its sibling {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_stay_where_they_belong(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    if path.parent.name != "sglang_cpu":  # which runs in SGLang's own environment
        assert "sglang" not in roots
    assert "nemo_run" not in roots
    if part(path) not in MEGATRON_ALLOWED:
        assert "megatron" not in roots
    if part(path) == "algo":
        assert not {name for name in imports(path) if name.startswith("torch.distributed")}


def test_one_file_knows_nemo_run() -> None:
    root = PACKAGE.parent
    files = [path for folder in ("slurm", "recipes", "benchmarks") for path in (root / folder).rglob("*.py")]
    found = [path for path in files if "nemo_run" in {name.split(".")[0] for name in imports(path)}]
    assert found == [root / "slurm/launch.py"]


def test_bounds_need_no_torch() -> None:
    assert "torch" not in {name.split(".")[0] for name in imports(PACKAGE / "algo/bounds.py")}


def test_the_loop_fits_on_one_screen() -> None:
    tree = ast.parse((PACKAGE / "train.py").read_text())
    loop = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    assert loop.end_lineno - loop.lineno < 30


def test_files_and_functions_stay_small() -> None:
    for path in modules():
        text = path.read_text()
        assert text.count("\n") <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 70, f"{path}: {node.name}"
