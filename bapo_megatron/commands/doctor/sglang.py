"""SGLang environment checks of ``bapo doctor``: versions, GPUs, memory saver and kernel compilers.

``sglang_rows`` yields their rows. SGLang has its own environment, so nothing of it is imported here: child
processes of its interpreter, with deadlines, report versions and GPUs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from bapo_megatron.commands.doctor.packages import SGLANG, SGLANG_CUDA, TRAINING, pins
from bapo_megatron.commands.doctor.rows import DoctorRow, missing, one_line
from bapo_megatron.rollout.engines.sglang.requirements import install_command
from bapo_megatron.runtime.child_process import CommandResult, run_command
from bapo_megatron.runtime.device import should_have_gpu

SECTION = "SGLang"
DEADLINE_S = 30.0
GPU_DEADLINE_S = 120.0
"""Seconds for that environment's torch to load and initialize CUDA."""
PACKAGES = {"sglang": True, "torch": True, "sglang-router": False}
"""Packages to look up, and whether servers require them."""
_KERNELS = "sglang-kernel"
"""Package of an environment from `make cluster`, absent from one made by `make sglang`."""
_CUDA = Path("/usr/local/cuda")
"""Where SGLang and FlashInfer look last for CUDA's compiler."""

_TOOLKIT = ("bin/nvcc", "include/cuda_runtime.h")
"""Files of a usable toolkit: a folder of links to programs has no headers."""

_ASK = """
import json, sys
from importlib import metadata
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except Exception:
        found[name] = None
print(json.dumps(found))
"""

_ASK_GPU = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"


def sglang_rows(required: bool, given: Path | None = None, colocated: bool = False) -> Iterator[DoctorRow]:
    """Yield the rows of SGLang's environment. ``required``: the run starts servers, so what is missing is a
    problem; ``given``: the recipe's interpreter; ``colocated``: servers share the trainer's GPUs."""
    use = "for rollout.engine=sglang"
    try:
        from bapo_megatron.rollout.engines.sglang.requirements import tried_preload
        from bapo_megatron.rollout.engines.sglang.server_process import (
            CUDA_ENVIRONMENT,
            server_environment,
            sglang_python,
        )

        python = sglang_python(given)
    except Exception as error:  # ConfigError, or any error of a broken package
        yield DoctorRow(SECTION, "interpreter", missing(required), one_line(error), use, install_command())
        return
    child = run_command([str(python), "-I", "-c", _ASK, *PACKAGES, _KERNELS], DEADLINE_S)
    versions = _versions(child.output)
    if child.ended or versions is None:
        found = f"{python}: {one_line(child.reason() or 'no answer')}"
        yield DoctorRow(SECTION, "interpreter", missing(required), found, use, install_command())
        return
    yield DoctorRow(SECTION, "interpreter", "ok", f"{python}, Python {versions['python']}", use)
    is_cuda = versions.get(_KERNELS) is not None or python.parents[1].name == CUDA_ENVIRONMENT
    command, tested = tested_versions(is_cuda)
    for name, needed in PACKAGES.items():
        yield sglang_package_row(name, versions.get(name), tested.get(name), required, needed, command)
    if versions.get("torch") and should_have_gpu():
        yield sglang_gpu_row(run_command([str(python), "-I", "-c", _ASK_GPU], GPU_DEADLINE_S), required)
        environment = server_environment(cuda=True, colocated=True, python=python)
        yield preload_row(tried_preload(python, environment, GPU_DEADLINE_S), python, colocated)
        yield compilers_row(environment, required)


def tested_versions(is_cuda: bool) -> tuple[str, dict[str, str]]:
    """Return the command that builds an environment, with CUDA kernels or without, and its versions."""
    if is_cuda and SGLANG_CUDA.is_file():
        return "make cluster", pins(SGLANG_CUDA)
    return install_command(), {"torch": pins(TRAINING)["torch"], **pins(SGLANG)}


def preload_row(child: CommandResult, python: Path, required: bool) -> DoctorRow:
    """Return the row of the memory saver, the library that colocated servers preload: whether it loads."""
    name, needed = "memory saver", "a library that colocated servers preload"
    if not child.ended:
        return DoctorRow(SECTION, name, "ok", "its library is found and loads", needed)
    fix = (
        f"a missing libcudart.so.13: {python} -m pip install nvidia-cuda-runtime, or its folder in "
        "LD_LIBRARY_PATH; a missing libcuda.so.1: the driver; a missing package: make cluster"
    )
    return DoctorRow(SECTION, name, missing(required), one_line(child.reason()), needed, fix)


def compilers_row(environment: Mapping[str, str], required: bool) -> DoctorRow:
    """Return the row of the compilers for a server's kernels, found as SGLang does, links unresolved."""
    name, needed = "kernel compilers", "ninja and CUDA's toolkit, by which servers compile kernels"
    path = environment["PATH"]
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = None if home else shutil.which("nvcc", path=path)
    toolkit = Path(home) if home else Path(nvcc).parents[1] if nvcc else _CUDA
    places = {"ninja": Path(shutil.which("ninja", path=path) or "")}
    places |= {file: toolkit / file for file in _TOOLKIT}
    absent = [name for name, place in places.items() if not place.is_file()]
    if not absent:
        return DoctorRow(SECTION, name, "ok", str(toolkit / _TOOLKIT[0]), needed)
    lacks = [f"no {file} in {toolkit}" if file in _TOOLKIT else f"no {file}" for file in absent]
    fix = (
        f"CUDA's toolkit: load its module, or set CUDA_HOME to the folder that has {', '.join(_TOOLKIT)}; "
        f"ninja: {install_command()}"
    )
    return DoctorRow(SECTION, name, missing(required), "; ".join(lacks), needed, fix)


def sglang_gpu_row(child: CommandResult, required: bool) -> DoctorRow:
    """Return the row of the GPUs that SGLang's torch can use."""
    name, needed = "torch's GPUs", "GPUs that servers can use"
    if not child.ended:
        return DoctorRow(SECTION, name, "ok", f"{child.output.strip()} GPUs", needed)
    fix = "make cluster, and a driver for the CUDA of that torch"
    return DoctorRow(SECTION, name, missing(required), one_line(child.reason()), needed, fix)


def sglang_package_row(
    name: str, version: str | None, tested: str | None, required: bool, needed: bool, command: str
) -> DoctorRow:
    """Return the row of one package; only the pinned version is ok, since SGLang's wire format changes."""
    purpose = "" if needed else "for the router, "
    said = f"{purpose}tested: {tested}"
    fix = f"{command} installs the tested versions"
    if version is None:
        return DoctorRow(SECTION, name, missing(required and needed), "not installed", said, fix)
    if version.partition("+")[0] != tested:
        return DoctorRow(SECTION, name, "optional", f"{version}, which was not tested", said, fix)
    return DoctorRow(SECTION, name, "ok", version, said)


def _versions(output: str) -> dict[str, str | None] | None:
    with suppress(ValueError):
        versions: dict[str, str | None] = json.loads(output)
        return versions
    return None
