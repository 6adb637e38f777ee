"""Out-of-memory kills and failing file systems on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster.cluster import Cluster
from tests.slurm.jobs import submit
from tests.slurm.test_survival import ONE, requeues, stand_in

pytestmark = pytest.mark.slurm
KILLED = "error: rank 1 on n1 was killed by SIGKILL, most likely because the node had no memory left"


def test_a_rank_killed_for_memory_ends_the_others(cluster: Cluster, run: Path) -> None:
    """The other rank waits for an hour, as with NCCL."""
    flags = stand_in(steps=50, every=1, crash_at=3, harm="memory")
    waits = {"BAPO_WAIT_S": "900", "BAPO_CRASH_WAIT_S": "2"}
    job = submit(cluster, run, "colocated.sbatch", [*ONE, "--nodelist=n1"], flags, **waits)
    assert job.wait()["JobState"] == "FAILED", job.log()
    assert [(row["rank"], row["exit_code"]) for row in job.events("ranks_ended")] == [(1, 137)] * 2
    assert requeues(job) == ["crash"]
    assert job.events("job_requeue")[0]["cause"].startswith(KILLED)
    assert job.events("job_requeue")[0]["exit_code"] == 137
    top = job.log(restart=1).splitlines()[:2]
    assert top[0].startswith("STOPPED: crash: crash, and no newer checkpoint than step 2")
    assert top[1].startswith(f"cause: {KILLED}")


def test_a_failing_file_system_is_tried_again_a_few_times(cluster: Cluster, run: Path) -> None:
    job = submit(cluster, run, "colocated.sbatch", ONE, stand_in(code=4), BAPO_MAX_IDLE="1")
    assert job.wait()["JobState"] == "FAILED"
    assert requeues(job) == ["storage", "storage"]
    assert job.log(restart=2).startswith("STOPPED: storage: storage, and no newer checkpoint than step 0")
