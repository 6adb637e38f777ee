"""Submission through NeMo-Run, a real training run over two nodes, and the commands that look at a run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.run_job import cancel, newest_logs, show_logs
from bapo_megatron.commands.cluster.status import read_status, status_text
from bapo_megatron.commands.cluster.submit import SubmitCommand, nemo_run_python
from bapo_megatron.commands.cluster.submit import submit as submit_run
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.slurm.cluster.cluster import Cluster
from tests.slurm.jobs import HERE, RECIPE, ROOT, Job, settings, submit
from tests.slurm.test_survival import ONE, stand_in, steps_made

pytestmark = pytest.mark.slurm
CLUSTER = (ROOT / "slurm/clusters/local_test.toml").read_text()


@pytest.fixture
def environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a user's shell on the cluster."""
    for name, value in settings(cluster).items():
        if not name.startswith("BAPO_"):
            monkeypatch.setenv(name, value)


def test_nemo_run_submits_what_the_dry_run_shows(
    cluster: Cluster, run: Path, tmp_path: Path, environment: None
) -> None:
    try:
        nemo_run_python()
    except ConfigError as error:
        pytest.skip(str(error))
    path = tmp_path / "cluster.toml"
    path.write_text(
        CLUSTER.replace("gpus_per_node", f'python = "{HERE}/bin/python-stand-in"\ngpus_per_node', 1)
    )
    config = replace(load_recipe(ROOT / RECIPE, RunConfig), run_dir=run)
    command = SubmitCommand(ROOT / RECIPE, path, True, False, ("--steps", "3"))
    shown = submit_run(command, config)
    assert not run.exists()
    job = Job(cluster, run, submit_run(replace(command, dry_run=False), config).strip())
    assert (run / "logs/submitted.sbatch").read_text() == shown
    # Slurm keeps the header of each component apart, and no blank lines; the rest is what it runs.
    kept = cluster.call("scontrol", "write", "batch_script", job.number, "-")
    assert commands(kept) == commands(shown)
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    nodes = job.events("job_start")[0]["nodes"].split()
    assert len(job.events("start")[0]["urls"]) == 2
    names = {path.name for path in (run / "logs" / job.number / "0").glob("*.log")}
    assert names == {
        "job.log",
        *(f"trainer-{node}-{rank}.log" for rank, node in enumerate(nodes[:2])),
        *(f"rollout-{node}-{rank}.log" for rank, node in enumerate(nodes[2:])),
    }
    assert [row["kind"] for row in job.events() if "job" in row][:2] == ["job_start", "job_ready"]


def commands(script: str) -> list[str]:
    return [line for line in script.splitlines() if line and not line.startswith("#")]


@pytest.mark.slow
def test_a_real_run_on_two_nodes_and_then_on_one(cluster: Cluster, run: Path) -> None:
    """Two gloo processes, tensor parallel between the nodes; the probe's all-reduce before them. Another job
    continues it on one node."""
    two = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"]
    small = ["--steps=2", "--parallel.tensor=2", "--rollout.prompts-per-step=4", "--rollout.group-size=4"]
    small += ["--evaluation.every=0", "--reward.workers=1"]
    real = {"BAPO_PYTHON": sys.executable, "BAPO_HEALTH": "on", "OMP_NUM_THREADS": "1"}
    job = submit(cluster, run, "colocated.sbatch", two, [*small, "--logging.no-tensorboard"], **real)
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2]
    assert job.events("start")[0]["processes"] == 2
    assert job.events("nodes_healthy")
    assert (run / "export/model.safetensors").exists()
    health = next(run.glob("logs/*/0/health/0/n1.json")).read_text()
    assert '"all_reduce": "ok"' in health
    assert {path.read_text() for path in run.glob("logs/*/0/ended/*")} == {"0\n"}
    one = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=8"]
    less = ["--steps=3", "--parallel.tensor=1", *small[2:], "--logging.no-tensorboard"]
    job = submit(cluster, run, "colocated.sbatch", one, less, **real)
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]
    assert [(row["step"], row["processes"]) for row in job.events("resume")] == [(3, 1)]


def test_cancel_lets_a_run_save_and_stop(cluster: Cluster, run: Path, environment: None) -> None:
    job = submit(cluster, run, "colocated.sbatch", [*ONE, "--time=30"], stand_in(steps=500, step_s=0.2))
    job.until(lambda: steps_made(job) and len(read_jsonl(run / "metrics.jsonl")) > 2)
    status = read_status(run)
    assert (status.state, status.job and status.job.job) == ("RUNNING", job.number)
    assert status.seconds_left is not None
    assert 1000 < status.seconds_left < 1800
    assert "told to save and stop" in cancel(run)
    assert job.wait()["JobState"] == "COMPLETED"
    assert job.events("job_cancelled")[0]["step"] > 0
    assert not job.events("job_requeue")
    assert not (run / "stop").exists()
    text = status_text(read_status(run))
    assert f"job         {job.number}, cancelled, restart 0, on n" in text
    out = io.StringIO()
    show_logs(run, out)
    assert "stopped on request; the last checkpoint is of step" in out.getvalue()
    assert newest_logs(run)[0].name == "job.log"
    with pytest.raises(ConfigError, match="no job of it is in the queue"):
        cancel(run)


def test_a_wrong_argument_ends_the_job_before_anything_starts(cluster: Cluster, run: Path) -> None:
    missing = subprocess.run(
        ["sbatch", "--wait", f"--output={run.parent}/out", "--nodes=1", "slurm/colocated.sbatch", "no.py"],
        cwd=ROOT, env=settings(cluster), capture_output=True, text=True,
    )  # fmt: skip
    assert missing.returncode == 2
    assert "error: recipe no.py does not exist" in (run.parent / "out").read_text()
    assert not os.path.exists(ROOT / "runs/no")
