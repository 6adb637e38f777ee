"""The batch script of `bapo submit`, made by the real NeMo-Run: what pyxis, Slurm and a log get to see."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.cluster_file import ClusterFile, load_cluster
from bapo_megatron.commands.cluster.job import ClusterJob
from bapo_megatron.commands.cluster.submit import nemo_run_python
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import AnsweringChild
from tests.support.executables import executable

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/bp_math_32b_64k.py"
PYXIS = load_cluster(ROOT / "slurm/clusters/h100_pyxis.toml")


LAUNCHER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import launch
for line in sys.stdin:
    print(json.dumps(launch.script_of(json.loads(line))), flush=True)
"""


@pytest.fixture(scope="module")
def script_of() -> Iterator[Callable[..., str]]:
    """What `bapo submit --dry-run` prints; tests/slurm runs the command."""
    try:
        python = nemo_run_python()
    except ConfigError as error:
        pytest.skip(str(error))
    with closing(AnsweringChild([python, "-c", LAUNCHER, str(ROOT / "slurm")], os.environ)) as child:

        def script(cluster: ClusterFile, templates: Path = ROOT / "slurm") -> str:
            job = ClusterJob(load_recipe(RECIPE, RunConfig), cluster, RECIPE, (), ROOT, templates)
            return str(child.ask(job.specification(), 900))

        yield script


def header(script: str, flag: str) -> list[str]:
    """Values of a flag of sbatch, one for each group."""
    return re.findall(rf"(?m)^#SBATCH --{flag}(?:=(.*))?$", script)


def sruns(script: str) -> list[list[str]]:
    return [shlex.split(line) for line in script.splitlines() if line.startswith("srun --het-group")]


def test_pyxis_gets_each_option_once(script_of: Callable[..., str]) -> None:
    """It refuses a second --container-workdir, and with it the step: no container could start."""
    steps = sruns(script_of(replace(PYXIS, mounts=("/shared:/shared", f"{ROOT}:{ROOT}"))))
    assert ["--distribution=block" in words for words in steps] == [True, False]
    for words in steps:
        given = [word for word in words if word.startswith("--container-")]
        assert given == [
            "--container-image=/shared/images/bapo-megatron.sqsh",
            f"--container-workdir={ROOT}",
            f"--container-mounts=/shared:/shared,{ROOT}:{ROOT}",
            "--container-name=$BAPO_CONTAINER_NAME",
        ]


def test_a_token_of_the_cluster_file_gets_into_no_log(script_of: Callable[..., str], tmp_path: Path) -> None:
    """NeMo-Run's script traces itself into a file that others may read, until the settings are exported."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/job.sh").write_text('bapo_begin() { echo "$HF_TOKEN"; exit; }\n')
    cluster = replace(PYXIS, environment={"HF_TOKEN": "hf_secret", "no_proxy": "a,b"})
    path = tmp_path / "script"
    path.write_text(script_of(cluster, tmp_path))
    stubs = "srun() { :; }; scontrol() { :; }; export -f srun scontrol; exec bash $0"
    found = subprocess.run(["bash", "-c", stubs, str(path)], capture_output=True, text=True)
    assert found.stdout == "hf_secret\n"
    assert "export PYTHONUNBUFFERED" in found.stderr  # it is traced
    assert "hf_secret" not in found.stderr


def test_the_servers_of_a_node_get_its_cores(script_of: Callable[..., str]) -> None:
    """One task has them all, where eight ranks have twelve cores each."""
    script = script_of(PYXIS)
    assert (header(script, "ntasks-per-node"), header(script, "cpus-per-task")) == (["8", "1"], ["12", "96"])
    assert not header(script_of(replace(PYXIS, cpus_per_task=None)), "cpus-per-task")


def test_gpus_as_a_site_wants_them_asked_for(script_of: Callable[..., str]) -> None:
    for sbatch, per_node, gres in (
        ({}, ["8", "8"], []),
        ({"gpus-per-node": "h100:8"}, ["h100:8", "h100:8"], []),
        ({"gres": "nvme:1,gpu:8"}, [], ["nvme:1,gpu:8", "nvme:1,gpu:8"]),
        ({"gres": "nvme:1"}, ["8", "8"], ["nvme:1", "nvme:1"]),
    ):
        script = script_of(replace(PYXIS, sbatch=sbatch))
        assert (header(script, "gpus-per-node"), header(script, "gres")) == (per_node, gres)
    # One without a value is a switch.
    assert header(script_of(replace(PYXIS, sbatch={"spread-job": ""})), "spread-job") == ["", ""]


def test_a_tasks_variables_are_stronger_than_the_images(tmp_path: Path) -> None:
    """pyxis gives a task the image's value of a variable that both have."""
    cluster = replace(PYXIS, environment={"NCCL_DEBUG": "a b", "HF_TOKEN": "secret"})
    job = ClusterJob(load_recipe(RECIPE, RunConfig), cluster, RECIPE, (), ROOT, ROOT / "slurm")
    shown = 'echo "$NCCL_DEBUG|$BAPO_SGLANG_PYTHON|$*"\nenv | grep -c secret'
    python = executable(tmp_path / "python", shown)
    image = {"NCCL_DEBUG": "of the image", "BAPO_SGLANG_PYTHON": "of the image"}
    mine = {**job.settings(), "BAPO_LIB": f"{ROOT}/slurm/lib", "BAPO_PYTHON": str(python), **image}
    command = ["bash", str(ROOT / "slurm/task.sh"), "probe", "--gpus=8"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/", **mine}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    probe = f"{ROOT}/slurm/probe.py --gpus=8"
    # One variable has the token, as in any task: a filter by names must not meet another that holds it.
    assert found.stdout == f"a b|/opt/sglang/bin/python|{probe}\n1\n", found.stderr
    outside = replace(job, cluster=replace(cluster, container=None, mounts=()))
    assert "BAPO_TASK_SETTINGS" not in outside.settings()


def test_what_nemo_run_would_replace_is_refused() -> None:
    """It puts its own folder in the place of /nemo_run, wherever that stands in a script."""
    try:
        command = [nemo_run_python(), str(ROOT / "slurm/launch.py"), "--dry-run"]
    except ConfigError as error:
        pytest.skip(str(error))
    found = subprocess.run(command, input='{"run": "/data/nemo_run/x"}', capture_output=True, text=True)
    assert found.returncode == 1
    assert "rename the folder" in found.stderr
