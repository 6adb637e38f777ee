"""The versions that `make cluster` installs: one contract for both environments, and both resolve, on Python
3.11 and on 3.12."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from bapo_megatron.commands.doctor.packages import SGLANG, TRAINING, pins
from bapo_megatron.trainer.kernel_check import FLA
from bapo_rehearsal.te_sources import VERSIONS
from tests.support.once import made_once

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "cluster"
PIP = f"pip=={pins(CLUSTER / 'build.txt')['pip']}"
"""The one that installs. It reads a wheel's metadata without its gigabytes (`fast-deps`, `--dry-run`)."""


PYTHONS = ("3.11", "3.12")
STACKS = {"3.11": ("0.16.1", VERSIONS[0]), "3.12": ("0.19.2", VERSIONS[1])}
"""megatron-core and Transformer Engine by Python."""


def pinned(name: str | Path, python: str = PYTHONS[-1]) -> dict[str, str]:
    """Versions in a file of cluster/ for ``python``; extras in brackets are left out."""
    lines = (line.partition("#")[0].strip() for line in (CLUSTER / name).read_text().splitlines())
    return {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in wanted_by(filter(None, lines), python)
    }


def wanted_by(lines: Iterable[str], python: str, extra: str = "") -> list[Requirement]:
    """Those of the requirements that count on ``python``."""
    place = {"python_version": python, "python_full_version": f"{python}.9", "extra": extra}
    wanted = [Requirement(line) for line in lines]
    return [one for one in wanted if one.marker is None or one.marker.evaluate(place)]


def requirements(distribution: str) -> dict[str, SpecifierSet]:
    """What an installed package requires, extras included, by canonical name."""
    found = [Requirement(line) for line in metadata.requires(distribution) or []]
    return {canonicalize_name(one.name): one.specifier for one in found}


def test_the_servers_compiler_and_its_headers_are_of_one_cuda() -> None:
    """Else the first kernel fails: "CUDA compiler and CUDA toolkit headers are incompatible" (cub)."""
    servers = pinned("sglang.txt")
    names = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl", "cuda-nvrtc")
    versions = {name: servers[f"nvidia-{name}"] for name in names}
    assert len({versions[name] for name in ("cuda-nvcc", "cuda-crt", "nvvm")}) == 1
    assert {version.rpartition(".")[0] for version in versions.values()} == {"13.0"}, versions
    assert servers["cuda-toolkit"].startswith("13.0.")


@pytest.mark.parametrize("python", PYTHONS)
def test_transformer_engine_is_the_version_that_was_tested_with_megatron(
    python: str, package: dict[str, Any]
) -> None:
    megatron, engine = STACKS[python]
    assert pinned(TRAINING, python)["megatron-core"] == megatron
    trainer = pinned("trainer.txt", python)
    parts = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    assert {trainer[name] for name in parts} == {engine}
    [extra] = [
        one
        for one in wanted_by(package["extras_require"]["cluster"], python)
        if one.name == "transformer-engine"
    ]
    assert (str(extra.specifier), extra.extras) == (f"=={engine}", {"core_cu13", "pytorch"})
    [core] = [one for one in wanted_by(package["install_requires"], python) if one.name == "megatron-core"]
    assert core.specifier.contains(megatron)
    if metadata.version("megatron-core") == megatron and python == "3.11":  # 0.19 names no version
        assert requirements("megatron-core")["transformer-engine"].contains(engine)


def test_the_kernels_of_delta_net_are_of_the_version_that_a_run_asks_for() -> None:
    assert f"fla-core=={pinned('trainer.txt')['fla-core']}" == FLA
    (line,) = re.findall(r'"(fla-core[^"]*)"', (ROOT / "setup.py").read_text())
    assert Requirement(line).specifier.contains(pinned("trainer.txt")["fla-core"])


def test_the_versions_are_those_that_the_tests_run() -> None:
    assert SpecifierSet(">=2.6,<2.14").contains(pins(TRAINING)["torch"])
    assert '"torch>=2.6,<2.14"' in (ROOT / "setup.py").read_text()
    servers, tested = pinned("sglang.txt"), pins(SGLANG)
    assert servers["nvidia-nccl-cu13"] == pinned("nccl.txt")["nvidia-nccl-cu13"]  # both environments have one
    assert {name: servers[name] for name in ("sglang", "sglang-router", "transformers")} == {
        name: tested[name] for name in ("sglang", "sglang-router", "transformers")
    }
    for python in PYTHONS:
        assert not set(pinned("trainer.txt", python)) & set(pins(TRAINING))  # one place for each version


def test_the_oldest_aiohttp_has_the_arguments_that_connections_are_made_with() -> None:
    """`TCPConnector(socket_factory=...)` is a TypeError of 3.11, at the first call of a server."""
    client = (ROOT / "bapo_megatron/rollout/engines/sglang/http_client.py").read_text()
    assert "socket_factory=" in client
    (line,) = re.findall(r'"(aiohttp[^"]*)"', (ROOT / "setup.py").read_text())
    assert not Requirement(line).specifier.contains("3.11.18")
    assert Requirement(line).specifier.contains(pins(TRAINING)["aiohttp"])


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py says."""
    arguments: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", arguments.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def test_the_trainers_environment_has_the_tasks_that_the_gpu_study_draws_by_default(
    package: dict[str, Any],
) -> None:
    """`make gpu-study` needs no network then: reasoning-gym and what it imports are there from the start."""
    assert "reasoning-gym champ-dataset" in (CLUSTER / "install.sh").read_text()
    installed = {canonicalize_name(Requirement(line).name) for line in package["extras_require"]["cluster"]}
    needs = [Requirement(line) for line in metadata.requires("reasoning-gym") or []]
    missing = {canonicalize_name(one.name) for one in needs if one.marker is None} - installed
    # pycosat is stood in for; torch needs sympy, transformers pyyaml.
    assert missing == {"pycosat", "pyyaml", "sympy"}


AS_PYTHON = """
import sys
from pip._vendor.packaging import markers
from pip._internal.cli.main import main

place, python = markers.default_environment, sys.argv[1]
markers.default_environment = lambda: {
    **place(), "python_version": python, "python_full_version": python + ".9"
}
sys.exit(main(sys.argv[2:]))
"""
"""pip takes wheels for the Python of `--python-version`, and reads markers for the one that it runs on."""


def run_pip(folder: Path | None, *arguments: str, python: str = "") -> subprocess.CompletedProcess[str]:
    """The pip in ``folder``, or ours, with the registry alone: folders of wheels on this machine may hold CPU
    builds of torch. That in ``folder`` sees no installed package. ``python``: it reads markers for this one.
    """
    keep = {"PIP_CERT", "PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT", "PIP_PROXY"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") or k in keep}
    environment["PIP_CONFIG_FILE"] = os.devnull
    how = ["-c", AS_PYTHON, python] if python else ["-m", "pip"]
    if folder:
        environment["PYTHONPATH"], how = str(folder), ["-S", *how]
    return subprocess.run([sys.executable, *how, *arguments], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that pip. Skips where there is no registry."""

    def make(folder: Path) -> None:
        done = run_pip(None, "install", "--quiet", "--no-deps", "--target", str(folder), PIP)
        if done.returncode:
            pytest.skip(f"no package registry here: {done.stderr.strip().splitlines()[-1]}")

    return made_once(tmp_path_factory, "pip", make)


def resolve(pip: Path, folder: Path, python: str, *wanted: str) -> dict[str, dict[str, Any]]:
    """The metadata of each package that pip would install for ``python``, by canonical name. Nothing is
    installed."""
    report = folder / "report.json"
    how = ["--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--only-binary=:all:"]
    how += ["--python-version", python, "--target", str(folder / "nothing")]
    done = run_pip(pip, "install", "--quiet", *how, "--report", str(report), *wanted, python=python)
    assert done.returncode == 0, done.stderr
    installed = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {canonicalize_name(one["name"]): one for one in installed}


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_the_servers_environment_resolves_to_what_is_pinned(pip: Path, tmp_path: Path, python: str) -> None:
    found = resolve(pip, tmp_path, python, "-r", str(CLUSTER / "sglang.txt"))
    assert {name: one["version"] for name, one in found.items()} == pinned("sglang.txt")


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_the_trainers_environment_resolves(pip: Path, tmp_path: Path, python: str) -> None:
    """CUDA builds beside the tested versions, and a newer NCCL than torch names: of one ABI, so not an older.

    transformer-engine-torch and flash-attn come as source, and their metadata only with torch: looked up.
    """
    trainer = pinned("trainer.txt", python)
    engine = f"transformer-engine[core_cu13]=={trainer['transformer-engine']}"
    wheels = [engine, f"wandb=={trainer['wandb']}", f"fla-core=={trainer['fla-core']}"]
    build = ["-r", str(CLUSTER / "build.txt")]
    found = resolve(pip, tmp_path, python, "-c", str(TRAINING), *build, "torch", "megatron-core", *wheels)
    assert found["megatron-core"]["version"] == STACKS[python][0]
    assert found["transformer-engine-cu13"]["version"] == trainer["transformer-engine-cu13"]
    assert any(name.startswith("nvidia-cublas") for name in found)  # a CUDA build
    wanted = Version(found["nvidia-nccl-cu13"]["version"])
    ours = Version(pinned("nccl.txt")["nvidia-nccl-cu13"])
    assert wanted.major == ours.major
    assert wanted <= ours
    for name, version in {
        "transformer-engine-torch": trainer["transformer-engine-torch"],
        "flash-attn": pinned("flash_attn.txt")["flash-attn"],
        "nvidia-nccl-cu13": str(ours),
    }.items():
        listed = run_pip(pip, "index", "versions", name).stdout
        assert version in re.split(r"[\s,:]+", listed), name
