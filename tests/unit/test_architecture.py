"""Imports run one way. The rules are in docs/architecture.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bapo_megatron"
TOOLS = ROOT / "checkpoints_tools"

# Lower layers first; a module may import from its own layer and from those before it.
LAYERS = [
    {"types", "errors", "files", "disk", "ending", "interrupt", "memory", "mkl", "parent", "watchdog"},
    {"algo"},
    {"config", "config_checks", "config_outputs", "config_sglang"},
    {"interfaces", "distributed", "named_weights"},
    {"data", "reward"},
    {"rollout", "policy", "sync", "state", "checkpoints_tools"},
    {"progress", "report", "recipe", "plan"},
    {"evaluation"},
    {"record", "canary"},
    {"certificate", "clipping", "old_log_probs", "alarm"},
    {"build", "sft"},
    {"saving"},
    {"waiting"},
    {"evaluate"},
    {"preflight", "train"},
    {"finish", "verify", "doctor", "cluster", "study"},
    {"cli"},
]
SIBLINGS = ("rollout", "policy", "sync", "state")
MEGATRON_ALLOWED = ("policy", "state")
# All that the tools for checkpoints know of the trainer.
TOOLS_MAY_USE = {"errors", "files", "policy.hf_config", "policy.hf_names"}


def modules() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part(path: Path) -> str:
    """The module or subpackage directly under the package; the tools are one part."""
    if path.is_relative_to(TOOLS):
        return TOOLS.name
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def project_parts(path: Path) -> set[str]:
    names = [name.split(".") for name in imports(path)]
    parts = {name[1] for name in names if name[0] == "bapo_megatron" and len(name) > 1}
    return parts - {"__version__"} | {TOOLS.name for name in names if name[0] == TOOLS.name}


def layer_of(name: str) -> int:
    for number, layer in enumerate(LAYERS):
        if name in layer:
            return number
    raise AssertionError(f"{name} is in no layer: add it to LAYERS and to docs/architecture.md")


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    own = part(path)
    if own == "__init__":
        return
    for other in project_parts(path):
        assert layer_of(other) <= layer_of(own), f"{path.name} imports {other}, which is above it"
        if own in SIBLINGS and other in SIBLINGS:
            assert own == other, f"{own} imports its sibling {other}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_heavy_packages_stay_where_they_belong(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    if path.parent.name != "sglang_cpu":  # which runs in SGLang's own environment
        assert "sglang" not in roots
    assert "nemo_run" not in roots
    if part(path) not in MEGATRON_ALLOWED:
        assert "megatron" not in roots
    if part(path) == "algo":
        assert not {name for name in imports(path) if name.startswith("torch.distributed")}


@pytest.mark.parametrize("path", sorted(TOOLS.rglob("*.py")), ids=name_of)
def test_the_tools_for_checkpoints_stand_alone(path: Path) -> None:
    """They run where there is little memory and no GPU: no torch, and of the trainer its table of names."""
    names = set(imports(path))
    assert not {"torch", "megatron", "transformers", "safetensors"} & {name.split(".")[0] for name in names}
    ours = {name.removeprefix("bapo_megatron.") for name in names if name.startswith("bapo_megatron.")}
    for name in ours:
        assert any(f"{name}.".startswith(f"{allowed}.") for allowed in TOOLS_MAY_USE), name


def test_one_file_knows_nemo_run() -> None:
    root = PACKAGE.parent
    files = [path for folder in ("slurm", "recipes", "benchmarks") for path in (root / folder).rglob("*.py")]
    found = [path for path in files if "nemo_run" in {name.split(".")[0] for name in imports(path)}]
    assert found == [root / "slurm/launch.py"]


def test_bounds_need_no_torch() -> None:
    assert "torch" not in {name.split(".")[0] for name in imports(PACKAGE / "algo/bounds.py")}


def test_the_table_of_names_needs_no_torch() -> None:
    """The tools for checkpoints start at once and in little memory."""
    script = "import sys, bapo_megatron.hf.parameter_map; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


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
