"""The layout of the package: imports run one way, rooms stay small. The rules are in docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bapo_megatron"
TOOLS = ROOT / "checkpoints_tools"
REHEARSAL = ROOT / "bapo_rehearsal"

# Lower layers first. A module may import from its own layer and from those before it.
LAYERS = [
    {"types", "step_header", "tensor_types", "errors", "interfaces"},
    {"runtime", "workers", "algo"},
    {"config", "hf", "layers"},
    {"data", "reward", "environment", "checkpoints_tools"},
    {"rollout", "policy", "checkpoint"},
    {"evaluation"},
    {"trainer"},
    {"train"},  # here the core ends, which trains: it never imports what estimates and rehearses it
    {"planning"},
    {"commands", "cli"},
    {"bapo_rehearsal"},  # a tool beside the package, which nothing of the package imports
]
SIBLINGS = {"rollout", "policy", "checkpoint"}
"""They never import each other: what one needs of another comes through ``interfaces``, from ``trainer``."""
LARGEST_ROOM = 20
TOOLS_MAY_USE = {
    *("errors", "runtime.files", "runtime.run_paths", "runtime.text_table", "runtime.written_folders"),
    *("hf.blocks", "hf.config", "hf.families", "hf.fp8", "hf.parameter_map", "hf.safetensors_folder"),
    *("hf.weight_files", "layers"),
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name to file of every module of the package and of the two tools beside it."""
    paths = sorted(path for folder in (PACKAGE, TOOLS, REHEARSAL) for path in folder.rglob("*.py"))
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """Every name that a file imports, dotted; also inside of functions."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def room(name: str) -> str:
    """The room, or the module at the root, that a module is of; each tool is one."""
    parts = name.split(".")
    return ".".join(parts[1:2]) if parts[0] == PACKAGE.name else parts[0]


def layer(name: str) -> int:
    for number, rooms in enumerate(LAYERS):
        if room(name) in rooms:
            return number
    raise AssertionError(f"{name} is in no layer: add its room to LAYERS and to docs/architecture.md")


def imported_modules(name: str) -> set[str]:
    """The modules of this repository that a module imports, without its own room's ``__init__``."""
    found = {one for one in imports(modules()[name]) if one in modules()}
    return {one for one in found if not f"{name}.".startswith(f"{one}.")}


def test_imports_run_one_way() -> None:
    for name in modules():
        if not room(name):
            continue
        for other in filter(room, imported_modules(name)):
            assert layer(other) <= layer(name), f"{name} imports {other}, which is above it"
            if {room(name), room(other)} <= SIBLINGS:
                assert room(name) == room(other), f"{name} imports {other}, of a sibling room"


BY_PATH = {
    "cli": {"bapo_rehearsal"},
    "config.transports": {"rollout"},
    "runtime.device": {"policy"},
    "layers.attention": {"policy"},
    "layers.delta_net": {"policy"},
    "layers.mlp": {"policy"},
}
"""Rooms above that a module names by string paths. Who loads those of transports is in ``rollout``."""


def test_paths_in_strings_run_one_way_too() -> None:
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        constants = [one.value for one in ast.walk(tree_of(path)) if isinstance(one, ast.Constant)]
        named = {one.partition(":")[0] for one in constants if isinstance(one, str)} & modules().keys()
        if above := {room(one) for one in named if room(one) and layer(one) > layer(name)}:
            found[name.removeprefix("bapo_megatron.")] = above
    assert found == BY_PATH


@cache
def defined(path: Path) -> frozenset[str]:
    """Every name that a file gives to something, wherever it stands in it."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return frozenset(found)


OURS = "(?:bapo_megatron|bapo_rehearsal|checkpoints_tools)"
IMPORT = re.compile(rf"^\s*from ({OURS}[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def imported_by_others(text: str) -> Iterator[tuple[str, str]]:
    """Module and attribute of each import from the package. By a pattern: to parse all tests takes 20 s."""
    for module, names in IMPORT.findall(text):
        for name in re.sub(r"#.*|[()]", "", names).split(","):
            if name := name.strip().partition(" as ")[0]:
                yield module, name


def test_what_others_import_of_the_package_exists() -> None:
    """Also in functions and scripts, and in what neither mypy nor a test reads: studies, recipes."""
    folders = ("benchmarks", "recipes", "slurm", "studies", "docs", "tests")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for module, name in imported_by_others(path.read_text()):
            known = {*defined(modules()[module])} if module in modules() else set()
            is_there = name in known or f"{module}.{name}" in modules()
            assert is_there, f"{path.relative_to(ROOT)} imports {module}.{name}, which is not there"


def test_no_two_modules_import_each_other() -> None:
    order = [*TopologicalSorter({name: imported_modules(name) for name in modules()}).static_order()]
    assert set(order) == set(modules())  # a circle has raised, with its modules


def test_rooms_stay_small() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        *("__init__", "cli", "errors", "interfaces", "step_header", "tensor_types", "train", "types")
    }
    for folder in {path.parent for path in modules().values()}:
        files = [path for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(files) <= LARGEST_ROOM, f"{folder.relative_to(ROOT)} has {len(files)} files"


def test_heavy_packages_stay_where_they_belong() -> None:
    for name, path in modules().items():
        roots = {one.split(".")[0] for one in imports(path)}
        if path.parent.name not in ("sglang_cpu", "sglang_launch"):  # they run in SGLang's own environment
            assert "sglang" not in roots, name
        assert "nemo_run" not in roots, name
        assert room(name) in ("policy", "bapo_rehearsal") or "megatron" not in roots, name
        if room(name) == "algo":
            assert not {one for one in imports(path) if one.startswith("torch.distributed")}, name


def test_the_tools_for_checkpoints_stand_alone() -> None:
    """They run where there is little memory and no GPU: no torch, and of the trainer its table of names."""
    for path in TOOLS.rglob("*.py"):
        names = set(imports(path))
        heavy = {"torch", "megatron", "transformers", "safetensors"}
        assert not heavy & {name.split(".")[0] for name in names}, path
        for name in (name for name in names if name.startswith("bapo_megatron.")):
            ours = name.removeprefix("bapo_megatron.")
            assert any(f"{ours}.".startswith(f"{allowed}.") for allowed in TOOLS_MAY_USE), (path, name)


# Their pickles come from a process that this one has started, by a pipe or a file of its own.
MAY_UNPICKLE = {
    "bapo_megatron.runtime.child_process",
    "bapo_megatron.policy.background_save",
    "bapo_rehearsal.job",
}
LOADERS = {"load", "loads", "Unpickler", "unsafe_load", "full_load", "load_all"}
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle"} | {
    "marshal",
    "shelve",
    "joblib",
    "yaml",
}
UNSAFE_CALLS = {"torch.load", "torch.jit.load", "torch.hub.load", "msc.torch.load", "load_object"}


def loads_of(path: Path) -> Iterator[str]:
    """Calls of a file that may run what they read, or that leave it open whether they do."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        if (owner in UNSAFE_MODULES and name in LOADERS) or called in UNSAFE_CALLS:
            yield called
        elif called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
            yield f"{called} without allow_pickle=False"
        elif name in ("from_pretrained", "from_config") and given.get("trust_remote_code") != "False":
            yield f"{called} without trust_remote_code=False"
        elif "AutoModel" in owner and name != "from_config" and given.get("use_safetensors") != "True":
            yield f"{called} without use_safetensors=True"
        elif given.get("trust_remote_code", "False") != "False" or given.get("weights_only") == "False":
            yield called
        elif called.endswith("dist_checkpointing.load"):
            yield f"{called} with megatron's readers"


def test_nothing_that_is_loaded_runs() -> None:
    """docs/security.md; recipes, which are code, come by ``runpy`` or an import."""
    for name, path in modules().items():
        if name not in MAY_UNPICKLE:
            assert not list(loads_of(path)), name
    for name in MAY_UNPICKLE:
        assert list(loads_of(modules()[name])), f"{name} unpickles nothing any more: remove it from the list"


def test_templates_are_ours_or_sandboxed() -> None:
    """Pages are made of templates of the package; those of a tokenizer are transformers' to render."""
    for name, path in modules().items():
        uses = {one for one in imports(path) if one.split(".")[0] == "jinja2"}
        assert not uses or name == "bapo_megatron.commands.report.page", (name, uses)


def test_a_preflight_imports_no_megatron() -> None:
    """It refuses a run three seconds sooner, and `bapo doctor` calls it in a process of its own."""
    heavy = "{'megatron', 'sympy', 'transformers', 'torch._dynamo'}"
    script = f"import sys, bapo_megatron.trainer.preflight; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True) == "set()\n"


def test_the_table_of_names_needs_no_torch() -> None:
    """The tools for checkpoints start at once and in little memory."""
    script = "import sys, bapo_megatron.hf.parameter_map; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


def test_the_loop_fits_on_one_screen() -> None:
    tree = tree_of(PACKAGE / "train.py")
    loop = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    assert loop.end_lineno - loop.lineno < 30


def test_files_and_functions_stay_small() -> None:
    for path in modules().values():
        assert path.read_text().count("\n") <= 450, path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 70, f"{path}: {node.name}"


def test_every_docstring_begins_with_what_the_thing_is() -> None:
    """Every module and public class or function has a docstring whose first line says something."""
    for name, path in modules().items():
        tree = tree_of(path)
        if path.stem == "__init__" and not tree.body:
            continue
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ]
        for node in (tree, *public):
            first = (ast.get_docstring(node) or "").split("\n")[0]
            where = f"{name}: {getattr(node, 'name', 'the module')}"
            assert len(first.split()) >= 3, f"{where}: {first!r} does not say what it is"
