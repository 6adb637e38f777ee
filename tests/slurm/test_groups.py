"""Jobs of trainer and rollout nodes, and the templates beside them, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints_tools import verify
from tests.slurm.cluster.cluster import Cluster
from tests.slurm.jobs import submit
from tests.slurm.test_survival import ONE, stand_in, steps_made
from tests.support.checkpoint_models import save_random_model

pytestmark = pytest.mark.slurm
TWO_AND_TWO = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", ":", "--nodes=2", "--gpus-per-node=8"]


@pytest.mark.slow
def test_a_lost_rollout_node_needs_no_requeue_and_a_lost_trainer_node_does(
    cluster: Cluster, run: Path
) -> None:
    flags = stand_in(steps=70, step_s=0.5, every=1)
    job = submit(cluster, run, "train.sbatch", TWO_AND_TWO, flags)
    job.until(lambda: steps_made(job))
    urls = job.events("start")[0]["urls"]
    lost, kept = job.nodes(1)
    assert sorted(url.split(":")[1].strip("/") for url in urls) == sorted([lost, kept])
    cluster.fail(lost)
    job.until(lambda: job.events("rollout_lost"))
    assert [lost in row["engine"] for row in job.events("rollout_lost")] == [True]
    assert not job.events("server_ended")
    assert job.fields()["JobState"] == "RUNNING"
    assert not job.events("job_requeue")
    second = job.nodes(0)[1]
    cluster.fail(second)
    cluster.restore(second)  # it has only booted: when the ranks have ended it is up again
    job.until(lambda: job.events("job_requeue"))
    assert job.events("job_requeue")[0]["reason"] == "node"
    for node in set(cluster.nodes) - set(cluster.call("sinfo", "-hN", "-t", "idle", "-o", "%N").split()):
        cluster.restore(node)
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    assert job.events("resume")[0]["step"] == job.events("job_requeue")[0]["step"] + 1


def test_servers_of_another_job_serve_a_run(cluster: Cluster, run: Path) -> None:
    servers = submit(
        cluster, run, "rollout.sbatch", ["--array=0-1", "--gpus-per-node=8"], [], BAPO_SERVERS_PER_NODE="2"
    )
    job = submit(cluster, run, "colocated.sbatch", ONE, [], BAPO_ENGINES="4", BAPO_ENGINES_WAIT_S="60")
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    assert len(set(job.events("start")[0]["urls"])) == 4
    assert job.events("engines_ready")[0]["engines"] == 4
    cluster.call("scancel", servers.number)


def test_a_run_reports_missing_servers(cluster: Cluster, run: Path) -> None:
    job = submit(cluster, run, "colocated.sbatch", ONE, [], BAPO_ENGINES="1", BAPO_ENGINES_WAIT_S="2")
    assert job.wait()["JobState"] == "FAILED"
    assert [row["expected"] for row in job.events("engines_missing")] == [1, 1]
    assert [row["reason"] for row in job.events("job_requeue")] == ["engines"]
    assert job.log(restart=1).startswith("STOPPED: engines: engines, and no newer checkpoint")


def test_an_evaluation_is_an_array(cluster: Cluster, run: Path) -> None:
    run.mkdir()
    command = [str(run), "sh", "-c", 'echo "{shard} of {shards}: $SLURMD_NODENAME"']
    job = submit(cluster, run, "evaluate.sbatch", ["--array=0-1"], command, words=True)
    job.until(lambda: len(job.events("evaluate_done")) == 2)
    found = sorted(path.read_text()[:7] for path in run.glob("logs/*/0/evaluate-*.log"))
    assert found == ["0 of 2:", "1 of 2:"]
    assert {row["exit_code"] for row in job.events("evaluate_done")} == {0}


def test_a_conversion_by_our_converter(cluster: Cluster, run: Path) -> None:
    """Its script is on nobody's PATH; a second job for the same output is refused, as at the prompt."""
    model = save_random_model(run / "hf")
    words = [str(run), "bapo-ckpt", "to-megatron", str(model), str(run / "megatron")]
    job = submit(cluster, run, "convert.sbatch", [], words, words=True)
    assert job.wait()["ExitCode"] == "0:0"
    assert verify(model, run / "megatron").equal
    again = submit(cluster, run, "convert.sbatch", [], words, words=True)
    assert again.wait()["ExitCode"] == "2:0"
    [log] = run.glob(f"logs/{again.number}/0/convert-*.log")
    assert "exists; --overwrite replaces it" in log.read_text()


def test_bapo_eval_is_an_array_of_steps_and_suites(cluster: Cluster, run: Path) -> None:
    run.mkdir()
    arguments = [str(run), "100,latest", "aime24,math500", "--samples", "4"]
    job = submit(cluster, run, "eval.sbatch", ["--array=0-4"], arguments, words=True, BAPO_PYTHON="echo")
    job.until(lambda: len(job.events("eval_done")) == 4)
    found = sorted(path.read_text().strip() for path in run.glob("logs/*/0/eval-*.log"))
    begin = f"-m bapo_megatron.cli eval {run} --step"
    assert found == [
        f"{begin} {step} --suite {suite} --samples 4"
        for step in ("100", "latest")
        for suite in ("aime24", "math500")
    ]
