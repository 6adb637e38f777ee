"""Preemption, time limits, crashes and lost nodes on a real Slurm: requeue, exclusion or stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.status import read_status
from tests.slurm.cluster.cluster import Cluster
from tests.slurm.jobs import Job, submit

pytestmark = pytest.mark.slurm
ONE = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2"]


def stand_in(**options: object) -> list[str]:
    return [f"--stand-in.{name.replace('_', '-')}={value}" for name, value in options.items()]


def steps_made(job: Job) -> bool:
    return (job.run / "metrics.jsonl").exists()


def requeues(job: Job) -> list[str]:
    return [row["reason"] for row in job.events("job_requeue")]


@pytest.mark.slow
def test_the_time_limit_is_met_with_a_checkpoint_and_a_requeue(cluster: Cluster, run: Path) -> None:
    limits = ["--time=1", "--signal=B:USR1@55"]
    job = submit(
        cluster, run, "colocated.sbatch", [*ONE, *limits], stand_in(steps=40, step_s=1), BAPO_LEAD_S="15"
    )
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    assert set(requeues(job)) == {"time_limit"}
    assert job.events("signal")[0]["signal"] == "USR1"
    assert 0 < job.events("signal")[0]["seconds_left"] < 60
    saved = job.events("job_requeue")[-1]["step"]  # Slurm's signal may come before the first step, once
    assert saved > 0
    assert job.events("resume")[-1]["step"] == saved + 1
    assert job.events("job_done")[0]["step"] == 40


def test_the_deadline_is_kept_without_a_signal_from_slurm(cluster: Cluster, run: Path) -> None:
    limits = ["--time=1", "--signal=B:USR2@1"]
    flags = stand_in(steps=12, step_s=0.5)
    job = submit(cluster, run, "colocated.sbatch", [*ONE, *limits], flags, BAPO_LEAD_S="55")
    job.until(lambda: job.events("job_requeue"))
    assert requeues(job) == ["time_limit"]
    assert job.events("signal")[0]["signal"] == "deadline"


def test_a_changed_time_limit_is_noticed_while_the_job_runs(cluster: Cluster, run: Path) -> None:
    """A later end, and then one that is near: it saves in time, as at a time limit."""
    flags = stand_in(steps=10_000, step_s=0.2)
    job = submit(
        cluster, run, "colocated.sbatch", [*ONE, "--time=1"], flags, BAPO_LEAD_S="45", BAPO_END_LOOK_S="1"
    )
    job.until(lambda: job.events("job_ready"))
    cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    job.until(lambda: job.events("job_end_moved"))
    status = read_status(run)
    assert status.seconds_left is not None
    assert status.seconds_left > 1200
    cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=2")
    job.until(lambda: job.events("job_requeue"))
    assert requeues(job) == ["time_limit"]
    assert 0 < job.events("signal")[-1]["seconds_left"] < 120


def test_scancel_with_a_signal_requeues_the_job(cluster: Cluster, run: Path) -> None:
    """`scancel --signal` tells the ranks and not the batch script."""
    job = submit(cluster, run, "colocated.sbatch", [*ONE, "--time=30"], stand_in(steps=12, step_s=0.5))
    job.until(lambda: steps_made(job))
    cluster.call("scancel", "--signal=USR1", job.number)
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    assert requeues(job) == ["preemption"]
    assert job.events("resume")[0]["step"] > 1


def test_a_preempted_job_saves_and_comes_back(cluster: Cluster, run: Path, tmp_path: Path) -> None:
    flags = stand_in(steps=10, step_s=0.5)
    low = submit(
        cluster, run, "colocated.sbatch", [*ONE, "--time=30", "--partition=low", "--nodelist=n1"], flags
    )
    low.until(lambda: steps_made(low))
    high = ["--partition=high", "--nodelist=n1", "--time=5"]
    submit(cluster, tmp_path / "high", "colocated.sbatch", [*ONE, *high], stand_in(steps=2))
    assert low.wait()["JobState"] == "COMPLETED", low.log()
    back = low.events("job_requeue") + low.events("job_requeued_by_slurm")
    assert [row["reason"] for row in back] == ["preemption"]
    assert low.events("resume")[0]["step"] > 1
    assert low.events("job_done")[0]["step"] == 10


def test_a_crash_loop_stops_and_reports_its_cause_first(cluster: Cluster, run: Path) -> None:
    job = submit(cluster, run, "colocated.sbatch", ONE, stand_in(crash_at=3))
    assert job.wait()["JobState"] == "FAILED"
    assert requeues(job) == ["crash"]
    top = job.log(restart=1).splitlines()[:3]
    assert top[0].startswith("STOPPED: crash: crash, and no newer checkpoint than step 0")
    assert "RuntimeError: CUDA error: an illegal memory access was encountered (trainer-" in top[1]
    assert job.events("job_stopped")[0]["cause"] in top[1]


@pytest.mark.parametrize(("code", "kind"), [(2, "config"), (3, "stopped")])
def test_no_requeue_after_a_permanent_error(cluster: Cluster, run: Path, code: int, kind: str) -> None:
    job = submit(cluster, run, "colocated.sbatch", ONE, stand_in(code=code))
    fields = job.wait()
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", f"{code}:0", "0")
    assert job.events("job_stopped")[0]["reason"] == kind
    assert job.log(restart=0).startswith(f"STOPPED: {kind}")


@pytest.mark.slow
def test_a_lost_first_node_is_counted_at_the_next_start(cluster: Cluster, run: Path) -> None:
    """The batch script dies with it: Slurm brings the job back."""
    job = submit(cluster, run, "colocated.sbatch", ONE, stand_in(steps=10, step_s=0.5, every=1))
    job.until(lambda: job.events("checkpoint"))
    cluster.fail(job.nodes()[0])
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    assert [row["reason"] for row in job.events("job_requeued_by_slurm")] == ["node"]
    assert job.events("resume")[0]["step"] > 1


@pytest.mark.slow
def test_bad_nodes_are_excluded_once(cluster: Cluster, run: Path) -> None:
    probe = {"BAPO_HEALTH": "on", "BAPO_HEALTH_FLAGS": "--no-all-reduce"}
    two = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"]
    gpus = {"BAPO_DEVICE": "", "USABLE_GPUS": "1", "LOST_GPUS": "n2=2"}
    job = submit(cluster, run, "colocated.sbatch", two, [], **probe, **gpus)
    assert job.wait()["JobState"] == "COMPLETED", job.log()
    excluded = job.events("nodes_excluded")[0]
    assert excluded["nodes"] == "n2"
    assert excluded["cause"] == "n2 GPUs: 6, 8 expected"
    assert job.events("nodes_healthy")[0]["nodes"] in ("n1 n3", "n3 n4", "n1 n4")


def test_bad_nodes_after_an_exclusion_stop_the_job(cluster: Cluster, run: Path) -> None:
    probe = {"BAPO_HEALTH": "on", "BAPO_HEALTH_FLAGS": "--no-all-reduce --memory-gb 1e9"}
    job = submit(cluster, run, "colocated.sbatch", ONE, [], **probe)  # no node has an exabyte
    assert job.wait()["JobState"] == "FAILED"
    assert len(job.events("nodes_excluded")) == 1
    assert job.log(restart=1).startswith("STOPPED: health: nodes n1 were left out before")
