"""The versions that `make cluster` installs: one contract for both environments, and both resolve."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bapo_megatron.commands.doctor.packages import SGLANG, TRAINING, canonical, pins
from bapo_megatron.trainer.kernel_check import FLA
from tests.support.once import made_once

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "cluster"
PIP = f"pip=={pins(CLUSTER / 'build.txt')['pip']}"
"""The one that installs. It reads a wheel's metadata without its gigabytes (`fast-deps`, `--dry-run`)."""


def pinned(name: str) -> dict[str, str]:
    """Versions in a file of cluster/; extras in brackets are left out."""
    return {re.sub(r"\[.*\]", "", package): version for package, version in pins(CLUSTER / name).items()}


def requirements(distribution: str) -> dict[str, SpecifierSet]:
    """What an installed package requires, extras included, by canonical name."""
    found = [Requirement(line) for line in metadata.requires(distribution) or []]
    return {canonical(one.name): one.specifier for one in found}


def test_both_environments_have_one_nccl() -> None:
    nccl = pinned("nccl.txt")
    assert list(nccl) == ["nvidia-nccl-cu13"]
    assert pinned("sglang.txt")["nvidia-nccl-cu13"] == nccl["nvidia-nccl-cu13"]


def test_the_servers_compiler_and_its_headers_are_of_one_cuda() -> None:
    """Else the first kernel fails: "CUDA compiler and CUDA toolkit headers are incompatible" (cub)."""
    servers = pinned("sglang.txt")
    names = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl", "cuda-nvrtc")
    versions = {name: servers[f"nvidia-{name}"] for name in names}
    assert len({versions[name] for name in ("cuda-nvcc", "cuda-crt", "nvvm")}) == 1
    assert {version.rpartition(".")[0] for version in versions.values()} == {"13.0"}, versions
    assert servers["cuda-toolkit"].startswith("13.0.")


def test_transformer_engine_is_a_tested_version_that_megatron_wants() -> None:
    trainer = pinned("trainer.txt")
    parts = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    versions = {trainer[name] for name in parts}
    assert len(versions) == 1
    assert requirements("megatron-core")["transformer-engine"].contains(versions.pop())
    setup = (ROOT / "setup.py").read_text()
    assert f'"transformer-engine[core_cu13,pytorch]=={trainer["transformer-engine"]}"' in setup


def test_the_kernels_of_delta_net_are_of_the_version_that_a_run_asks_for() -> None:
    assert f"fla-core=={pinned('trainer.txt')['fla-core']}" == FLA
    (line,) = re.findall(r'"(fla-core[^"]*)"', (ROOT / "setup.py").read_text())
    assert Requirement(line).specifier.contains(pinned("trainer.txt")["fla-core"])


def test_the_versions_are_those_that_the_tests_run() -> None:
    assert SpecifierSet(">=2.6,<2.14").contains(pins(TRAINING)["torch"])
    assert '"torch>=2.6,<2.14"' in (ROOT / "setup.py").read_text()
    servers, tested = pinned("sglang.txt"), pins(SGLANG)
    assert {name: servers[name] for name in ("sglang", "sglang-router", "transformers")} == {
        name: tested[name] for name in ("sglang", "sglang-router", "transformers")
    }
    assert not set(pinned("trainer.txt")) & set(pins(TRAINING))  # one place for each version


def test_the_oldest_aiohttp_has_the_arguments_that_connections_are_made_with() -> None:
    """`TCPConnector(socket_factory=...)` is a TypeError of 3.11, at the first call of a server."""
    client = (ROOT / "bapo_megatron/rollout/engines/sglang/http_client.py").read_text()
    assert "socket_factory=" in client
    (line,) = re.findall(r'"(aiohttp[^"]*)"', (ROOT / "setup.py").read_text())
    assert not Requirement(line).specifier.contains("3.11.18")
    assert Requirement(line).specifier.contains(pins(TRAINING)["aiohttp"])


def test_the_trainers_environment_has_the_tasks_that_the_gpu_study_draws_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`make gpu-study` needs no network then: reasoning-gym and what it imports are there from the start."""
    assert "reasoning-gym champ-dataset" in (CLUSTER / "install.sh").read_text()
    given: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    installed = {canonical(Requirement(line).name) for line in given["extras_require"]["cluster"]}
    needs = [Requirement(line) for line in metadata.requires("reasoning-gym") or []]
    missing = {canonical(one.name) for one in needs if one.marker is None} - installed
    # pycosat is stood in for; torch needs sympy, transformers pyyaml.
    assert missing == {"pycosat", "pyyaml", "sympy"}


# --- against the registry ------------------------------------------------------------------------


def run_pip(folder: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The pip in ``folder``, or ours, with the registry alone: folders of wheels on this machine may hold CPU
    builds of torch. That in ``folder`` sees no installed package."""
    keep = {"PIP_CERT", "PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT", "PIP_PROXY"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") or k in keep}
    environment["PIP_CONFIG_FILE"] = os.devnull
    how = ["-m"]
    if folder:
        environment["PYTHONPATH"], how = str(folder), ["-S", "-m"]
    return subprocess.run(
        [sys.executable, *how, "pip", *arguments], env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that pip. Skips where there is no registry."""

    def make(folder: Path) -> None:
        done = run_pip(None, "install", "--quiet", "--no-deps", "--target", str(folder), PIP)
        if done.returncode:
            pytest.skip(f"no package registry here: {done.stderr.strip().splitlines()[-1]}")

    return made_once(tmp_path_factory, "pip", make)


def resolve(pip: Path, folder: Path, *wanted: str) -> dict[str, dict[str, Any]]:
    """The metadata of each package that pip would install, by canonical name. Nothing is installed."""
    report = folder / "report.json"
    how = ("--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--only-binary=:all:")
    done = run_pip(pip, "install", "--quiet", *how, "--report", str(report), *wanted)
    assert done.returncode == 0, done.stderr
    installed = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {canonical(one["name"]): one for one in installed}


@pytest.mark.slow
def test_the_servers_environment_resolves_to_what_is_pinned(pip: Path, tmp_path: Path) -> None:
    found = resolve(pip, tmp_path, "-r", str(CLUSTER / "sglang.txt"))
    assert {name: one["version"] for name, one in found.items()} == pinned("sglang.txt")


@pytest.mark.slow
def test_the_trainers_environment_resolves(pip: Path, tmp_path: Path) -> None:
    """CUDA builds beside the tested versions, and a newer NCCL than torch names: of one ABI, so not an older.

    transformer-engine-torch and flash-attn come as source, and their metadata only with torch: looked up.
    """
    torch = f"torch=={pins(TRAINING)['torch']}"
    trainer = pinned("trainer.txt")
    engine = f"transformer-engine[core_cu13]=={trainer['transformer-engine']}"
    wheels = [
        torch,
        engine,
        f"wandb=={trainer['wandb']}",
        f"fla-core=={trainer['fla-core']}",
        f"megatron-core=={pins(TRAINING)['megatron-core']}",
    ]
    build = ["-r", str(CLUSTER / "build.txt")]
    found = resolve(pip, tmp_path, "-c", str(TRAINING), *build, *wheels)
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
