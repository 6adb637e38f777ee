"""Package checks of ``bapo doctor``: versions and imports of the training environment, and torch's GPUs.

    python -m bapo_megatron.commands.doctor.packages MODULE ...

``package_rows`` yields rows of Python, of each package that this one requires (its metadata, from
``setup.py``), and of torch's GPUs and compiler. It runs this module as a child process that imports the
packages in turn and prints a line of JSON after each: ``{"module": ..., "error": null or text, "facts":
{...}}``. If one hangs or crashes, the others are not tried. Tested versions are pinned in
``constraints.txt``, and for SGLang's environment in its ``requirements.txt`` or, for CUDA builds, in
``cluster/sglang.txt``; `make` installs them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.commands.doctor.rows import DoctorRow, State, one_line
from bapo_megatron.runtime.child_process import CommandResult, run_command, run_module
from bapo_megatron.runtime.device import DEVICE_VARIABLE, gpu_problem, wants_cpu

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

SECTION = "training"
_PACKAGE = Path(__file__).parents[2]
TRAINING = _PACKAGE / "constraints.txt"
SGLANG = _PACKAGE / "rollout/engines/sglang_cpu/requirements.txt"
SGLANG_CUDA = _PACKAGE.parent / "cluster/sglang.txt"
"""In the checkout; `make cluster` installs from it."""
IMPORT_DEADLINE_S = 300.0
"""Seconds for all imports together, even on a busy machine with a slow disk."""
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
_MODULES = {"megatron-core": "megatron.core", "tensorboard": "torch.utils.tensorboard"}
"""Modules to import of packages whose name is not their module's."""
_MEGATRON_RELEASES = ("0.16.", "0.19.")
"""Tested releases of megatron-core; others are permitted."""
_FUSED, _FUSED_MODULE = "transformer-engine", "transformer_engine.pytorch"
"""Package of fused layers, which can be imported only where torch sees a GPU."""


def package_rows() -> Iterator[DoctorRow]:
    """Yield the rows of Python, packages, torch's GPUs and compiler."""
    yield DoctorRow(SECTION, "Python", "ok", sys.version.split()[0])
    try:
        ranges, tested = permitted(), pins(TRAINING)
    except ImportError as error:  # without packaging, or without this package's metadata
        needed = "bapo-megatron and packaging, installed"
        yield DoctorRow(SECTION, "bapo-megatron", "problem", one_line(error), needed, "make setup")
        return
    modules = {name: _MODULES.get(name, name.replace("-", "_")) for name in ranges}
    errors, facts = try_imports([*modules.values(), _FUSED_MODULE])
    for name, module in modules.items():
        yield package_row(name, installed_version(name), errors.get(module), ranges[name], tested.get(name))
        if name == "torch" and errors.get(module) is None:
            yield gpu_row(facts)
    if facts.get("gpus"):
        yield compiler_row(run_command([sys.executable, "-c", _COMPILE], COMPILE_DEADLINE_S))
        yield fused_row(installed_version(_FUSED), errors.get(_FUSED_MODULE))


def installed_version(name: str) -> str | None:
    """Return the installed version; None if not installed, or without one in its metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def try_imports(modules: Sequence[str]) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Import the modules in a child process; return the error of each (None: none), and torch's facts about
    GPUs. The module at which the child ends has its reason; those after it are left out."""
    child = run_module("bapo_megatron.commands.doctor.packages", modules, IMPORT_DEADLINE_S)
    answers = {answer["module"]: answer for answer in map(json.loads, child.output.splitlines())}
    errors = {name: answer["error"] and one_line(answer["error"]) for name, answer in answers.items()}
    if child.ended:
        errors[next((name for name in modules if name not in errors), "")] = one_line(child.reason())
    return errors, answers.get("torch", {}).get("facts", {})


def package_row(
    name: str, version: str | None, error: str | None, allowed: SpecifierSet, tested: str | None
) -> DoctorRow:
    """Return the row of one required package, whose import raised ``error``, if it was tried."""
    needed = ", ".join(filter(None, (str(allowed), tested and f"tested: {tested}")))
    options = "--no-deps " if name == "megatron-core" else ""  # its own dependencies would change ours
    fix = f'pip install {options}"{name}{f"=={tested}" if tested else allowed}"'
    if version is None:
        return DoctorRow(SECTION, name, "problem", "not installed", needed, fix)
    if error:
        again = fix.replace("install", "install --force-reinstall", 1)
        found = f"{version}, and its import fails: {error}"
        return DoctorRow(SECTION, name, "problem", found, needed, again)
    if not allowed.contains(version, prereleases=True):
        return DoctorRow(SECTION, name, "problem", version, needed, fix)
    if name == "megatron-core" and not version.startswith(_MEGATRON_RELEASES):
        found = f"{version}: no layout, checkpoint, resumed run or rehearsal was tested with it"
        return DoctorRow(SECTION, name, "optional", found, needed, fix)
    return DoctorRow(SECTION, name, "ok", version, needed)


def fused_row(version: str | None, error: str | None) -> DoctorRow:
    """Return the row of the fused layers on a machine with GPUs."""
    found = f"{version}, and its import fails: {error}" if error else version or "not installed"
    state: State = "problem" if error else "ok" if version else "optional"
    return DoctorRow(SECTION, _FUSED, state, found, "for fused layers on GPUs", "make cluster")


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


# --- tested and permitted versions -----------------------------------------------------------------


def pins(path: Path) -> dict[str, str]:
    """Return the versions in ``path`` for this Python by canonical name: lines ``name==version; marker``."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    pinned = [Requirement(line) for line in lines if "==" in line]
    here = [one for one in pinned if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in here}


def permitted(distribution: str = "bapo-megatron") -> dict[str, SpecifierSet]:
    """Return the permitted versions by canonical name of package, without extras. Raises
    PackageNotFoundError if the distribution is not installed."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    requirements = [Requirement(text) for text in metadata.requires(distribution) or []]
    own = [one for one in requirements if "extra" not in str(one.marker)]
    return {canonicalize_name(one.name): one.specifier for one in own}


# --- the child process -----------------------------------------------------------------------------


def main(modules: Sequence[str]) -> None:
    """Import each module in order and print each outcome as a line of JSON."""
    from bapo_megatron.policy.megatron_versions import replace_triton_kernels

    warnings.simplefilter("ignore")
    replace_triton_kernels()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # module output must not mix with the JSON lines
    gpus: list[Any] = []
    for name in modules:
        if name == _FUSED_MODULE and not (gpus and installed_version(_FUSED)):
            continue
        print(f"import {name}", file=sys.stderr, flush=True)  # names a module that crashes silently
        error, facts = None, {}
        try:
            module = importlib.import_module(name)
            if name == "torch":
                facts = {**torch_facts(module), "asked": wants_cpu(), "problem": gpu_problem()}
                gpus = facts["gpus"]
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
