"""NeMo-Run launcher of a Slurm job: its batch script, printed or submitted. Only this file imports nemo_run.

``python launch.py [--dry-run] < specification.json`` prints the job's id, or the script that would be
submitted, the same to the byte. It runs in NeMo-Run's own environment, so it imports nothing of this project;
``bapo submit`` makes the specification (bapo_megatron/commands/cluster/job.py).

What NeMo-Run cannot express, and how this file does it:

- Its script waits for the sruns of all groups, kills all when one ends, and knows one way to requeue. Here
  the groups' sruns stay NeMo-Run's, but its last `wait` is ours: a function of that name, defined in
  `setup_lines`, supervises the trainer and decides about a requeue (slurm/lib/job.sh).
- The paths of logs depend on the restart, which only the job knows: another `--output` in `srun_args` comes
  after NeMo-Run's own, and so wins; the same for the working directory.
- It replaces `/nemo_run` wherever it stands in the script, so no path may hold it (`bapo submit` refuses).
- It writes variables and srun's arguments without quotes: this file quotes what needs them. The path of its
  own log, which it does not let one quote, is /dev/null: ours comes after it.
- Its experiments put the time into every path, and ask `sacct` for the state of jobs. They are not used:
  `SlurmExecutor` and its batch request make the script, and `bapo status` reports the run's state.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import nemo_run
from nemo_run.core.execution.slurm import SlurmBatchRequest, SlurmExecutor, SlurmJobDetails

_SETUP = """\
set +vx
. {library}
bapo_begin {arguments}
wait() {{
    if (($#)); then builtin wait "$@"; else bapo_supervise "${{pids[@]}}"; fi
}}"""


class _JobDetails(SlurmJobDetails):
    """NeMo-Run's paths of a job's logs. Made by ``executor_of``."""

    @property
    def srun_stdout(self) -> Path:
        return Path("/dev/null")


def executor_of(job: dict[str, Any], group: dict[str, Any]) -> SlurmExecutor:
    """NeMo-Run executor of one group of nodes."""
    role = group["role"]
    where = ("--container-workdir=" if job["container"] else "--chdir=") + job["root"]
    ending = ["--wait=0", "--no-kill"] if role == "rollout" else ['--wait="$BAPO_WAIT_S"']
    common = ["--kill-on-bad-exit=0", "--open-mode=append", "--cpu-bind=none", "--export=ALL"]
    if job["container"]:
        common.append('--container-name="$BAPO_CONTAINER_NAME"')  # the probe has unpacked it
    more = [*common, f'--output="$BAPO_LOGS/{role}-%N-%t.log"', *ending]
    return SlurmExecutor(
        **{name: value for name, value in job["slurm"].items() if value is not None},
        nodes=group["nodes"],
        ntasks_per_node=group["tasks"],
        gpus_per_node=job["gpus_per_node"] or None,
        job_name_prefix="",
        signal=f"B:USR1@{job['lead_s']}",
        container_image=job["container"] and shlex.quote(job["container"]),
        container_mounts=[shlex.quote(mount) for mount in job["mounts"]],
        setup_lines=_SETUP.format(
            library=shlex.quote(f"{job['templates']}/lib/job.sh"), arguments=job["arguments"]
        ),
        srun_args=[shlex.quote(where), *more],
        additional_parameters={"requeue": True, "no_kill": True, **job["sbatch"]},
        heterogeneous=len(job["groups"]) > 1,
        tunnel=nemo_run.LocalTunnel(job_dir=shlex.quote(job["run"])),  # in srun's arguments alone
        packager=nemo_run.Packager(),
        job_details=_JobDetails(job_name=job["name"], folder=f"{job['run']}/logs"),
        wait_time_for_group_job=0,
        monitor_group_job=False,
    )


def script_of(job: dict[str, Any]) -> str:
    """The batch script of the job."""
    groups = job["groups"]
    executors = [executor_of(job, group) for group in groups]
    executor = SlurmExecutor.merge(executors, num_tasks=len(groups))
    executor.job_dir = f"{job['run']}/logs"  # NeMo-Run mounts it, and begins there if nothing else is said
    task = shlex.quote(f"{job['templates']}/task.sh")
    request = SlurmBatchRequest(
        launch_cmd=["sbatch", "--parsable"],
        jobs=[group["role"] for group in groups],
        command_groups=[[f"bash {task} {group['role']} {job['arguments']}"] for group in groups],
        executor=executor,
        max_retries=0,  # the library requeues
        extra_env={name: shlex.quote(value) for name, value in job["settings"].items()},
    )
    return request.materialize()


def main() -> None:
    """Print the script, or submit it and print the job's id."""
    job = json.load(sys.stdin)
    script = script_of(job)
    if sys.argv[1:] == ["--dry-run"]:
        print(script, end="")
        return
    path = Path(job["run"]) / "logs/submitted.sbatch"
    # It holds the cluster file's [environment], which may have a token: readable by the user alone.
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(script)
    found = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"sbatch: {found.stderr.strip()}")
    print(found.stdout.split(";")[0].strip())


if __name__ == "__main__":
    main()
