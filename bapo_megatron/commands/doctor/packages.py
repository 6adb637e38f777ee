"""Package checks of ``bapo doctor``: versions and imports of the training environment, and torch's GPUs.

Packages are imported in child processes, so one that hangs or crashes costs only its own row. Used by
``doctor.py``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from bapo_megatron.commands.doctor.rows import DoctorRow, missing, one_line
from bapo_megatron.commands.doctor.tested import TRAINING, Permitted, canonical, permitted, pins
from bapo_megatron.runtime.child_process import run_module
from bapo_megatron.runtime.device import DEVICE_VARIABLE, has_apex

SECTION = "training"
IMPORT_DEADLINE_S = 120.0
"""Seconds for all imports together, on a busy machine with a slow disk."""
_LEAST_S = 5.0
"""Least seconds for the remaining imports, after one has used up the time."""
OLDEST_PYTHON = (3, 11)
_NOT_APEX = "{}, and it is not NVIDIA's: PyPI has another package of that name"


@dataclass(frozen=True)
class Package:
    """A package to check: its name, the module to import, its use, and how to install it.

    The table of packages in this module has them.
    """

    name: str
    module: str | None = None
    """The module that is imported to see whether it works; None: it is looked up, not imported."""
    purpose: str = ""
    """The use of an optional package. One without a purpose is required."""
    install: str = ""
    """Arguments of ``pip install``, where the name and the tested version are not enough."""
    on_gpu: bool = False
    """Imported where torch sees a GPU only, and then used: a failing import is a problem there."""


PACKAGES = (
    Package("torch", "torch"),
    Package("megatron-core", "megatron.core", install="--no-deps"),
    Package("transformers", "transformers"),
    Package("tokenizers", "tokenizers"),
    Package("safetensors", "safetensors"),
    Package("datasets", "datasets"),
    Package("math-verify", "math_verify"),
    Package("aiohttp", "aiohttp"),
    Package("uvloop", "uvloop"),
    Package("numpy", "numpy"),
    Package("packaging", "packaging"),
    Package("psutil", "psutil"),
    Package("einops", "einops"),
    Package("orjson", "orjson"),
    Package("pybase64", "pybase64"),
    Package("jinja2", "jinja2"),
    Package("matplotlib", "matplotlib"),
    Package("rich", "rich"),
    Package("tensorboard", "torch.utils.tensorboard"),
    Package("typeguard", "typeguard"),
    Package("tyro", "tyro"),
    Package("annotated-types", "annotated_types"),
    Package(
        "transformer-engine",
        "transformer_engine.pytorch",
        "fused layers on GPUs",
        "make cluster",
        on_gpu=True,
    ),
    Package("apex", None, "fused kernels on GPUs without Transformer Engine", "from source"),
    Package("flash-attn", None, "Transformer Engine's attention on an A100", "make cluster"),
    Package("wandb", None, "logging.trackers", '"wandb>=0.19"'),
    Package("trackio", None, "logging.trackers", '"trackio>=0.43,<0.44"'),
    Package("mlflow-skinny", None, "logging.trackers", '"mlflow-skinny>=3.17" sqlalchemy alembic'),
)


def package_rows(packages: Sequence[Package] = PACKAGES) -> Iterator[DoctorRow]:
    """The row of Python, then one for each package."""
    yield python_row(sys.version_info[:3])
    ranges, tested = permitted(), pins(TRAINING)
    versions = {package.name: installed_version(package.name) for package in packages}
    modules = [p.module for p in packages if p.module and not p.on_gpu and versions[p.name] is not None]
    imports = try_imports(modules)
    gpus = imports.get("torch", Import()).facts.get("gpus", [])
    on_gpu = [p.module for p in packages if p.module and p.on_gpu and gpus and versions[p.name] is not None]
    imports |= try_imports(on_gpu)
    for package in packages:
        result = imports.get(package.module or "", Import())
        name = canonical(package.name)
        row = package_row(package, versions[package.name], result, ranges.get(name), tested.get(name))
        if package.name == "apex" and row.state == "ok" and not has_apex():
            row = replace(row, state="optional", found=_NOT_APEX.format(row.found), fix="pip uninstall apex")
        yield row
        if package.name == "torch" and row.state == "ok":
            yield gpu_row(result.facts)


@dataclass(frozen=True)
class Import:
    """The outcome of one trial import: its error if it failed, and for torch what it says about GPUs.

    Made from a line that ``probe.py`` prints.
    """

    error: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def python_row(version: tuple[int, ...]) -> DoctorRow:
    """Row of this interpreter's version."""
    oldest = ".".join(map(str, OLDEST_PYTHON))
    found, needed = ".".join(map(str, version)), f"{oldest} or newer"
    if version >= OLDEST_PYTHON:
        return DoctorRow(SECTION, "Python", "ok", found, needed)
    return DoctorRow(SECTION, "Python", "problem", found, needed, f"make setup PYTHON=python{oldest}")


def installed_version(name: str) -> str | None:
    """The installed version, "unknown" if its metadata cannot be read; None if it is not installed."""
    try:
        return metadata.version(name) or "unknown"
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # a metadata folder that is torn raises whatever its parser does
        return "unknown"


def try_imports(modules: Sequence[str], deadline_s: float = IMPORT_DEADLINE_S) -> dict[str, Import]:
    """Import each module in a child process. One that hangs or crashes does not affect the others."""
    found: dict[str, Import] = {}
    end = time.monotonic() + deadline_s
    while left := [name for name in modules if name not in found]:
        child = run_module("bapo_megatron.commands.doctor.probe", left, max(end - time.monotonic(), _LEAST_S))
        for line in child.output.splitlines():
            answer = json.loads(line)
            found[answer["module"]] = Import(answer["error"] and one_line(answer["error"]), answer["facts"])
        failed = next((name for name in left if name not in found), None)
        if failed is not None:
            found[failed] = Import(one_line(child.reason() or "no answer"))
    return {name: found[name] for name in modules}


def package_row(
    package: Package, version: str | None, imported: Import, allowed: Permitted | None, tested: str | None
) -> DoctorRow:
    """The row of one package."""
    required = not package.purpose
    needed = _needed(package, allowed, tested)
    fix = _fix(package, allowed, tested)
    if version is None:
        return DoctorRow(SECTION, package.name, missing(required), "not installed", needed, fix)
    if imported.error:
        found = f"{version}, and its import fails: {imported.error}"
        again = fix.replace("pip install", "pip install --force-reinstall", 1)
        return DoctorRow(SECTION, package.name, missing(required or package.on_gpu), found, needed, again)
    if allowed is not None and version != "unknown" and not allowed.holds(version):
        return DoctorRow(SECTION, package.name, missing(required), version, needed, fix)
    return DoctorRow(SECTION, package.name, "ok", version, needed)


def gpu_row(facts: Mapping[str, Any]) -> DoctorRow:
    """Row of torch's build and GPUs: a problem if the machine should have GPUs and torch sees none."""
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


def _needed(package: Package, allowed: Permitted | None, tested: str | None) -> str:
    parts = [f"for {package.purpose}"] if package.purpose else []
    if allowed is not None and allowed.specifier:
        parts.append(allowed.specifier)
    if tested is not None:
        parts.append(f"tested: {tested}")
    return ", ".join(parts)


def _fix(package: Package, allowed: Permitted | None, tested: str | None) -> str:
    if package.install == "from source":
        return f"build {package.name} from source for this torch and CUDA"
    if package.install.startswith("make "):
        return package.install
    if package.purpose:
        return f"pip install {package.install}"
    version = f"=={tested}" if tested else allowed.specifier if allowed else ""
    return " ".join(filter(None, ("pip install", package.install, f'"{package.name}{version}"')))
