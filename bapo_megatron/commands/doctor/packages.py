"""Package checks of ``bapo doctor``: versions and imports of the training environment, and torch's GPUs.

    python -m bapo_megatron.commands.doctor.packages MODULE ...

``package_rows`` yields rows of Python, of each package, and of torch's GPUs and compiler. It runs this module
as a child process that imports the packages, so that one that hangs or crashes affects only its own row.
After each import the child prints a line of JSON:
``{"module": ..., "error": null or text, "facts": {...}}``. Tested versions are pinned in ``constraints.txt``,
and for SGLang's environment in its ``requirements.txt`` or, for CUDA builds, in ``cluster/sglang.txt``;
`make` installs them. Permitted ranges come from this package's metadata (``setup.py``).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bapo_megatron.commands.doctor.rows import DoctorRow, missing, one_line
from bapo_megatron.runtime.child_process import CommandResult, run_command, run_module
from bapo_megatron.runtime.device import DEVICE_VARIABLE, gpu_problem, wants_cpu

SECTION = "training"
_PACKAGE = Path(__file__).parents[2]
TRAINING = _PACKAGE / "constraints.txt"
SGLANG = _PACKAGE / "rollout/engines/sglang_cpu/requirements.txt"
SGLANG_CUDA = _PACKAGE.parent / "cluster/sglang.txt"
"""In the checkout; `make cluster` installs from it."""
IMPORT_DEADLINE_S = 300.0
"""Seconds for all imports together, even on a busy machine with a slow disk."""
_LEAST_S = 5.0
"""Minimum seconds for the remaining imports after one has used up the time."""
COMPILE_DEADLINE_S = 180.0
"""Seconds to compile one small kernel: torch imports its compiler and starts a worker per core."""
_COMPILE = """
import sys, torch
try:
    found = torch.compile(lambda x: 2 * x)(torch.ones(64, device="cuda"))
    assert found.sum().item() == 128
except Exception as error:
    sys.exit((str(error).strip() or repr(error)).splitlines()[0])
"""
"""Compiles a kernel the way the first update compiles SwiGLU."""


@dataclass(frozen=True)
class Package:
    """Package to check: its name, the module to import, its use, its tested releases, how to install it."""

    name: str
    module: str | None = None
    """Module for a trial import; None: only look up the version."""
    purpose: str = ""
    """Use of an optional package; empty for a required one."""
    install: str = ""
    """Arguments of ``pip install``, or a make command, if name and tested version are not enough."""
    on_gpu: bool = False
    """Import it only where torch sees a GPU; there, a failing import is a problem."""
    releases: tuple[str, ...] = ()
    """Tested releases, ``MAJOR.MINOR``, if others are permitted. Empty: all permitted ones."""


BOARDS = "logging.trackers"
"""Use of a board's package; a recipe that names one which is missing has a problem of its own."""
_OF_THEIR_NAMES = (
    *("transformers", "tokenizers", "safetensors", "datasets", "pyarrow", "math-verify", "aiohttp", "uvloop"),
    *("numpy", "packaging", "psutil", "einops", "orjson", "pybase64", "jinja2", "matplotlib", "rich"),
)
PACKAGES = (
    Package("torch", "torch"),
    Package("megatron-core", "megatron.core", install="--no-deps", releases=("0.16", "0.19")),
    *(Package(name, name.replace("-", "_")) for name in _OF_THEIR_NAMES),
    Package("tensorboard", "torch.utils.tensorboard"),
    *(Package(name, name.replace("-", "_")) for name in ("typeguard", "tyro", "annotated-types")),
    Package("transformer-engine", "transformer_engine.pytorch", "fused layers on GPUs", "make cluster", True),
    Package("apex", None, "fused kernels on GPUs without Transformer Engine", "from source"),
    Package("flash-attn", None, "Transformer Engine's attention on an A100", "make cluster CLUSTER_ARCH=8.0"),
    Package("fla-core", None, "Gated DeltaNet on GPUs", "make cluster"),
    Package("wandb", None, BOARDS, '"wandb>=0.19,<1"'),
    Package("trackio", None, BOARDS, '"trackio>=0.43,<0.44"'),
    Package("mlflow-skinny", None, BOARDS, '"mlflow-skinny>=3.17,<4" "sqlalchemy>=2,<3" "alembic>=1.14,<2"'),
)


def package_rows(packages: Sequence[Package] = PACKAGES) -> Iterator[DoctorRow]:
    """Yield the rows of Python, packages, torch's GPUs and compiler."""
    yield DoctorRow(SECTION, "Python", "ok", sys.version.split()[0])
    ranges, tested = permitted(), pins(TRAINING)
    versions = {package.name: installed_version(package.name) for package in packages}
    modules = [p.module for p in packages if p.module and not p.on_gpu and versions[p.name] is not None]
    imports = try_imports(modules)
    gpus = imports.get("torch", Import()).facts.get("gpus", [])
    on_gpu = [p.module for p in packages if p.module and p.on_gpu and gpus and versions[p.name] is not None]
    imports |= try_imports(on_gpu)
    for package in packages:
        result = imports.get(package.module or "", Import())
        name = package.name
        row = package_row(package, versions[name], result, ranges.get(name), tested.get(name))
        yield row
        if package.name == "torch" and row.state == "ok":
            yield gpu_row(result.facts)
            if gpus:
                yield compiler_row(run_command([sys.executable, "-c", _COMPILE], COMPILE_DEADLINE_S))


@dataclass(frozen=True)
class Import:
    """Outcome of one trial import: its error, if any, and for torch its facts about GPUs."""

    error: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def installed_version(name: str) -> str | None:
    """Return the installed version; None if not installed, or without one in its metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def try_imports(modules: Sequence[str], deadline_s: float = IMPORT_DEADLINE_S) -> dict[str, Import]:
    """Import the modules in a child process and return the outcomes by module. If one hangs or crashes, a
    new child imports the rest."""
    imports: dict[str, Import] = {}
    end = time.monotonic() + deadline_s
    while left := [name for name in modules if name not in imports]:
        limit_s = max(end - time.monotonic(), _LEAST_S)
        child = run_module("bapo_megatron.commands.doctor.packages", left, limit_s)
        for line in child.output.splitlines():
            answer = json.loads(line)
            imports[answer["module"]] = Import(answer["error"] and one_line(answer["error"]), answer["facts"])
        failed = next((name for name in left if name not in imports), None)
        if failed is not None:
            imports[failed] = Import(one_line(child.reason() or "no answer"))
    return {name: imports[name] for name in modules}


def package_row(
    package: Package, version: str | None, imported: Import, allowed: str | None, tested: str | None
) -> DoctorRow:
    """Return the row of one package."""
    required = not package.purpose
    needed = _needed(package, allowed, tested)
    fix = _fix(package, allowed, tested)
    if version is None:
        return DoctorRow(SECTION, package.name, missing(required), "not installed", needed, fix)
    if imported.error:
        found = f"{version}, and its import fails: {imported.error}"
        again = fix.replace("pip install", "pip install --force-reinstall", 1)
        return DoctorRow(SECTION, package.name, missing(required or package.on_gpu), found, needed, again)
    if allowed and not is_permitted(version, allowed):
        return DoctorRow(SECTION, package.name, missing(required), version, needed, fix)
    if package.releases and not version.startswith(tuple(f"{release}." for release in package.releases)):
        found = f"{version}: no layout, checkpoint, resumed run or rehearsal was tested with it"
        return DoctorRow(SECTION, package.name, "optional", found, needed, fix)
    return DoctorRow(SECTION, package.name, "ok", version, needed)


def gpu_row(facts: Mapping[str, Any]) -> DoctorRow:
    """Return the row of torch's build and GPUs; a problem if torch cannot use the machine's GPUs."""
    name = "torch's GPUs"
    if gpus := facts.get("gpus", []):
        model, memory = gpus[0]
        found = f"CUDA {facts['cuda']}, NCCL {facts['nccl']}, {len(gpus)} x {model} ({memory} GB)"
        return DoctorRow(SECTION, name, "ok", found)
    build = f"built for CUDA {facts['cuda']}" if facts.get("cuda") else "CPU build"
    if facts.get("asked"):
        return DoctorRow(SECTION, name, "ok", f"{build}, {DEVICE_VARIABLE}=cpu: runs train on the CPU")
    if problem := facts.get("problem"):
        found, _, fix = problem.rpartition(". ")
        return DoctorRow(SECTION, name, "problem", f"{build}: {found}", "GPUs that torch can use", fix)
    return DoctorRow(SECTION, name, "ok", f"{build}, no GPU here: runs train on the CPU")


def compiler_row(child: CommandResult) -> DoctorRow:
    """Return the row of torch's compiler, needed by a GPU's first update, from the run of ``_COMPILE``."""
    name, needed = "torch.compile", "the MLP's kernel, compiled in the first update"
    if not child.ended:
        return DoctorRow(SECTION, name, "ok", "compiles a kernel, which runs", needed)
    version = ".".join(map(str, sys.version_info[:2]))
    fix = f"install gcc and the headers of this Python (python{version}-dev) on this node; TMPDIR needs room"
    return DoctorRow(SECTION, name, "problem", one_line(child.reason()), needed, fix)


def _needed(package: Package, allowed: str | None, tested: str | None) -> str:
    parts = (package.purpose and f"for {package.purpose}", allowed, tested and f"tested: {tested}")
    return ", ".join(filter(None, parts))


def _fix(package: Package, allowed: str | None, tested: str | None) -> str:
    if package.install == "from source":
        return f"build {package.name} from source for this torch and CUDA"
    if package.install.startswith("make "):
        return package.install
    if package.purpose:
        return f"pip install {package.install}"
    version = f"=={tested}" if tested else allowed or ""
    return " ".join(filter(None, ("pip install", package.install, f'"{package.name}{version}"')))


# --- tested and permitted versions -----------------------------------------------------------------


def pins(path: Path) -> dict[str, str]:
    """Return the versions in ``path`` for this Python by canonical name: lines ``name==version; marker``."""
    lines = [line.partition("#")[0].partition(";") for line in path.read_text().splitlines()]
    wanted = [requirement.strip() for requirement, _, marker in lines if is_for_this_python(marker)]
    return {canonical(name): version for name, mark, version in (x.partition("==") for x in wanted) if mark}


def is_for_this_python(marker: str) -> bool:
    """Whether an environment marker (PEP 508) holds here; True if it is empty or packaging is missing."""
    try:
        from packaging.markers import Marker
    except ImportError:  # packaging has a row of its own
        return True
    return not marker.strip() or Marker(marker).evaluate()


def canonical(name: str) -> str:
    """Return a package's canonical name (PEP 503): lower case, hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def permitted(distribution: str = "bapo-megatron") -> dict[str, str]:
    """Return the permitted versions (PEP 440) by package, without extras; empty if metadata is missing."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in metadata.requires(distribution) or []]
    except (ImportError, metadata.PackageNotFoundError):  # packaging has a row of its own
        return {}
    return {
        canonical(requirement.name): str(requirement.specifier)
        for requirement in requirements
        if "extra" not in str(requirement.marker)
    }


def is_permitted(version: str, specifier: str) -> bool:
    """Whether ``specifier`` allows ``version``; True if packaging is missing or cannot parse it."""
    try:
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(specifier).contains(version, prereleases=True)
    except (ImportError, ValueError):  # packaging has a row of its own
        return True


# --- the child process -----------------------------------------------------------------------------


def main(modules: Sequence[str]) -> None:
    """Import each module in order and print each outcome as a line of JSON."""
    from bapo_megatron.policy.megatron_versions import replace_triton_kernels

    warnings.simplefilter("ignore")
    replace_triton_kernels()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # module output must not mix with the JSON lines
    for name in modules:
        print(f"import {name}", file=sys.stderr, flush=True)  # names a module that crashes silently
        error, facts = None, {}
        try:
            module = importlib.import_module(name)
            if name == "torch":
                facts = {**torch_facts(module), "asked": wants_cpu(), "problem": gpu_problem()}
        except BaseException as raised:  # packages raise anything, even SystemExit
            error = f"{type(raised).__name__}: {raised}"
        answers.write(json.dumps({"module": name, "error": error, "facts": facts}) + "\n")
        answers.flush()


def torch_facts(torch: Any) -> dict[str, Any]:
    """Return torch's `cuda` (None for a CPU build), `gpus` (name and GB of each) and `nccl`."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        gpus.append([device.name, round(device.total_memory / 1e9)])
    nccl = torch.cuda.nccl.version() if gpus else None
    return {"cuda": torch.version.cuda, "gpus": gpus, "nccl": nccl and ".".join(map(str, nccl))}


if __name__ == "__main__":
    main(sys.argv[1:])
