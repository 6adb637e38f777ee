"""The container's definition: what it copies exists, what it runs is the Makefile's, and the cluster file for
pyxis names what it makes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.cluster_file import load_cluster
from tests.support.executables import executable

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "cluster/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its continued lines as one."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in whole.splitlines() if line.strip()]


def run_lines() -> list[str]:
    return [text for name, text in instructions() if name == "RUN"]


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


def test_it_installs_as_make_cluster_does_what_the_cluster_file_names() -> None:
    """By the same script; wheels and downloads are kept in the builder's cache between tries."""
    installs = [shlex.split(line) for line in run_lines() if "cluster/install.sh" in line]
    assert all(words[0] == "--mount=type=cache,target=/root/.cache" for words in installs)
    folders = {words[-2]: words[-1] for words in installs}
    cluster = load_cluster(ROOT / "slurm/clusters/h100_pyxis.toml")
    assert cluster.python == f"{folders['trainer']}/bin/python"
    assert cluster.sglang_python == f"{folders['sglang']}/bin/python"

    makefile = (ROOT / "Makefile").read_text()
    assert Path(cluster.container or "").name == re.search(r"^IMAGE \?= (.*)$", makefile, re.MULTILINE)[1]  # type: ignore[index]


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
