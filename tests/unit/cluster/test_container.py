"""The container's definition: what it copies exists, what it runs is the Makefile's, and the cluster file for
pyxis names what it makes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.executables import executable

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "cluster/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its continued lines as one."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in whole.splitlines() if line.strip()]


def test_every_file_that_it_copies_exists_and_is_sent_to_the_builder() -> None:
    """And all that the installation and the package's set-up read is copied."""
    sources = [word for name, text in instructions() if name == "COPY" for word in text.split()[:-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == sent
    for source in sources:
        assert (ROOT / source).exists(), source
    script = (ROOT / "cluster/install.sh").read_text()
    for path in {*re.findall(r"cluster/\w+\.txt", script), "bapo_megatron/constraints.txt"}:
        assert (ROOT / path).is_file(), path
        assert path.split("/")[0] in sources


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of made-up docker and enroot that write down how they are called."""
    for name in ("docker", "enroot"):
        executable(tmp_path / name, f'echo "{name} $*" >>"{tmp_path}/calls"')
    return tmp_path


def make_image(path: str, image: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "IMAGE": str(image), "CLUSTER_ARCH": "8.0"} | variables
    script = [os.environ.get("BASH", "/bin/bash"), str(ROOT / "cluster/make_image.sh")]
    return subprocess.run(script, env=environment, capture_output=True, text=True)


def test_the_image_is_built_and_written_by_one_command(tools: Path) -> None:
    image = tools / "out.sqsh"
    done = make_image(f"{tools}:/usr/bin:/bin", image)
    assert done.returncode == 0, done.stderr
    build, write = (tools / "calls").read_text().splitlines()
    tag = build.split("-t ")[1].split()[0]
    assert re.fullmatch(r"bapo-megatron:\d+\.\d+.*", tag)
    assert build == f"docker build -f cluster/Dockerfile --build-arg CLUSTER_ARCH=8.0 -t {tag} ."
    assert write == f"enroot import -o {image} dockerd://{tag}"
    assert make_image(f"{tools}:/usr/bin:/bin", image, MAX_JOBS="3").returncode == 0
    assert "--build-arg MAX_JOBS=3 -t" in (tools / "calls").read_text()
    image.touch()
    again = make_image(f"{tools}:/usr/bin:/bin", image)
    assert (again.returncode, "exists" in again.stderr) == (2, True)
