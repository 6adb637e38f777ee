"""Slurm jobs of the tests: submission, waiting, logs and events."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.slurm.cluster.cluster import Cluster

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RECIPE = "recipes/demo_cpu.py"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


class Job:
    """One job and its run directory."""

    def __init__(self, cluster: Cluster, run: Path, number: str) -> None:
        self.cluster, self.run, self.number = cluster, run, number

    def fields(self) -> dict[str, str]:
        """What `scontrol show job` says of its first component."""
        text = self.cluster.call("scontrol", "show", "job", "-o", self.number).splitlines()
        return dict(re.findall(r"(\w+)=(\S*)", text[0])) if text else {}

    def nodes(self, component: int = 0) -> list[str]:
        lines = self.cluster.call("squeue", "-h", "-j", self.number, "-o", "%N").splitlines()
        return self.cluster.call("scontrol", "show", "hostnames", lines[component]).split()

    def wait(self, limit_s: float = 900) -> dict[str, str]:
        """Until it has ended. Requeued jobs are not made to wait for their turn."""
        self.until(lambda: self.fields().get("JobState") in ENDED, limit_s)
        return self.fields()

    def until(self, true: Callable[[], object], limit_s: float = 900) -> None:
        """Wait for a condition; AssertionError with the job's log if it takes too long."""
        deadline = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < deadline, f"{self.fields()}\n{self.log()}\n{self.events()}"
            self._hurry()
            time.sleep(0.3)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        rows = read_jsonl(path) if path.exists() else []
        return [row for row in rows if kind in (None, row["kind"])]

    def log(self, restart: int | None = None) -> str:
        """job.log of one start, or of all."""
        pattern = f"logs/{self.number}/{'*' if restart is None else restart}/job.log"
        return "\n".join(path.read_text() for path in sorted(self.run.glob(pattern)))

    def _hurry(self) -> None:
        """A requeued job is held back for a while; tests need not wait for that."""
        for line in self.cluster.call("squeue", "-h", "-j", self.number, "-o", "%i %T %r").splitlines():
            if line.endswith("PENDING BeginTime"):
                name = line.split()[0]
                offset = int(name.partition("+")[2] or 0)
                number = str(int(name.partition("+")[0]) + offset)
                self.cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now")


def settings(cluster: Cluster, **more: str) -> dict[str, str]:
    """Variables of a job: stand-ins instead of the trainer, its servers and the GPUs' driver."""
    return {
        **cluster.environment,
        "PATH": f"{HERE / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "REAL_PYTHON": sys.executable,
        "BAPO_PYTHON": str(HERE / "bin/python-stand-in"),
        "BAPO_DEVICE": "cpu",  # the cluster's GPUs are none
        "BAPO_HEALTH": "off",
        "BAPO_LOOK_S": "1",
        "BAPO_FRESH_S": "15",
        "BAPO_WAIT_S": "10",
        "BAPO_MARGIN_S": "30",
        **more,
    }


def submit(
    cluster: Cluster,
    run: Path,
    template: str,
    sbatch: list[str],
    flags: list[str],
    words: bool = False,
    **variables: str,
) -> Job:
    """``sbatch [sbatch flags] slurm/TEMPLATE RECIPE [flags]``, as a user says it; ``words``: no recipe."""
    run.mkdir(parents=True, exist_ok=True)
    command = [
        *("sbatch", "--parsable", f"--output={run}/sbatch.out", "--mem=200", *sbatch),
        f"slurm/{template}",
        *([] if words else [RECIPE, "--run-dir", str(run)]),
        *flags,
    ]
    found = subprocess.run(
        command, cwd=ROOT, env=settings(cluster, **variables), capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return Job(cluster, run, found.stdout.split(";")[0].strip())
