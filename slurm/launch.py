"""NeMo-Run launcher of a Slurm job: its batch script, printed or submitted. Only this file imports nemo_run.

``python launch.py [--dry-run] < specification.json`` submits the job and prints its id, or prints the script
that it would submit, byte for byte. ``bapo submit`` makes the specification (commands/cluster/job.py) and
runs this file in NeMo-Run's own environment, so it imports nothing of this project.

What NeMo-Run cannot express, and how this file does it:

- Its script waits for the sruns of all groups, kills all when one ends, and has one way to requeue. This file
  keeps the groups' sruns, but replaces the last `wait`: a function of that name, defined in `setup_lines`,
  supervises the trainer and decides about a requeue (slurm/lib/job.sh).
- The paths of logs depend on the restart, which only the job knows: another `--output` in `srun_args` comes
  after NeMo-Run's own and overrides it; the same for the working directory.
- pyxis rejects an option that is given twice, and NeMo-Run would add its own mounts and working directory. So
  NeMo-Run is not told of the container, whose flags are in `srun_args`.
- It traces the script while it exports variables, into a log that others may read. Ours, which may contain a
  token, are exported in `setup_lines`, after the trace is off.
- It gives all groups the trainer's cores per task. A rollout node has one task for all its servers:
  `_with_cores` corrects the header.
- It replaces `/nemo_run` anywhere in the script, so `main` rejects it.
- It writes arguments without quotes: this file quotes what needs them.
- Its own log path, which cannot be quoted, is set to /dev/null; the `--output` after it overrides it.
- Its experiments put the time into every path, and query `sacct` for job states. They are not used:
  `SlurmExecutor` and its batch request make the script, and `bapo status` reports the run's state.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import nemo_run
from nemo_run.core.execution.slurm import SlurmBatchRequest, SlurmExecutor, SlurmJobDetails

_SETUP = """\
set +vx
{settings}
. {library}
bapo_begin {arguments}
wait() {{
    if (($#)); then builtin wait "$@"; else bapo_supervise "${{pids[@]}}"; fi
}}"""


class _JobDetails(SlurmJobDetails):
    """NeMo-Run's job details, with /dev/null as its log of an srun."""

    @property
    def srun_stdout(self) -> Path:
        return Path("/dev/null")


def executor_of(job: dict[str, Any], group: dict[str, Any]) -> SlurmExecutor:
    """NeMo-Run executor of one group of nodes."""
    role, extra = group["role"], sbatch_flags(job["sbatch"])
    # Ranks of a node are neighbours: a site's or a user's other order would spread a tensor group over nodes.
    ending = ["--distribution=block", '--wait="$BAPO_WAIT_S"']
    if role == "rollout":
        ending = ["--wait=0", "--no-kill"]
    common = ["--kill-on-bad-exit=0", "--open-mode=append", "--cpu-bind=none", "--export=ALL"]
    more = [*common, f'--output="$BAPO_LOGS/{role}-%N-%t.log"', *ending]
    settings = [f"export {name}={shlex.quote(value)}" for name, value in job["settings"].items()]
    return SlurmExecutor(
        **{name: value for name, value in job["slurm"].items() if value is not None},
        nodes=group["nodes"],
        ntasks_per_node=group["tasks"],
        gpus_per_node=gpus_flag(job["gpus_per_node"], extra),
        job_name_prefix="",
        signal=f"B:USR1@{job['lead_s']}",
        setup_lines=_SETUP.format(
            settings="\n".join(settings),
            library=shlex.quote(f"{job['templates']}/lib/job.sh"),
            arguments=job["arguments"],
        ),
        srun_args=[shlex.quote(f"--chdir={job['root']}"), *container_flags(job), *more],
        additional_parameters={"requeue": True, "no_kill": True, **extra},
        heterogeneous=len(job["groups"]) > 1,
        tunnel=nemo_run.LocalTunnel(job_dir=shlex.quote(job["run"])),  # in srun's arguments alone
        packager=nemo_run.Packager(),
        job_details=_JobDetails(job_name=job["name"], folder=f"{job['run']}/logs"),
        wait_time_for_group_job=0,
        monitor_group_job=False,
    )


def container_flags(job: dict[str, Any]) -> list[str]:
    """pyxis flags of a group's srun, each once; none without a container."""
    if not job["container"]:
        return []
    flags = [f"--container-image={job['container']}", f"--container-workdir={job['root']}"]
    if job["mounts"]:
        flags.append(f"--container-mounts={','.join(job['mounts'])}")
    # Named: the probe has unpacked it.
    return [*map(shlex.quote, flags), '--container-name="$BAPO_CONTAINER_NAME"']


def sbatch_flags(given: dict[str, str]) -> dict[str, Any]:
    """The cluster file's sbatch flags by NeMo-Run's names; an empty value makes a switch (True)."""
    return {name.replace("-", "_"): value or True for name, value in given.items()}


def gpus_flag(count: int, sbatch: dict[str, Any]) -> Any:
    """Value of `--gpus-per-node`: the file's own flag (`h100:8`), or the number; None for `--gres` and 0."""
    if any(asked.split(":")[0] == "gpu" for asked in str(sbatch.get("gres", "")).split(",")):
        return None
    return sbatch.get("gpus_per_node") or count or None


def script_of(job: dict[str, Any]) -> str:
    groups = job["groups"]
    executors = [executor_of(job, group) for group in groups]
    executor = SlurmExecutor.merge(executors, num_tasks=len(groups))
    executor.job_dir = f"{job['run']}/logs"  # NeMo-Run begins there if nothing else is said
    task = shlex.quote(f"{job['templates']}/task.sh")
    request = SlurmBatchRequest(
        launch_cmd=["sbatch", "--parsable"],
        jobs=[group["role"] for group in groups],
        command_groups=[[f"bash {task} {group['role']} {job['arguments']}"] for group in groups],
        executor=executor,
        max_retries=0,  # the library requeues
        extra_env={},  # they would be traced
    )
    return _with_cores(request.materialize(), groups)


def _with_cores(script: str, groups: list[dict[str, Any]]) -> str:
    """``script`` with each group's own `--cpus-per-task` in its part of the header."""
    mark = "\n#SBATCH hetjob\n"
    parts = script.split(mark)
    for number, group in enumerate(groups):
        parts[number] = re.sub(
            r"(?m)^#SBATCH --cpus-per-task=.*$",
            f"#SBATCH --cpus-per-task={group['cpus_per_task']}",
            parts[number],
            count=1,
        )
    return mark.join(parts)


def main() -> None:
    """Print the script; or write it to RUN/logs/submitted.sbatch, submit it, and print the job's id."""
    text = sys.stdin.read()
    if "/nemo_run" in text:
        sys.exit("NeMo-Run replaces /nemo_run in every path, flag and variable of a job: rename the folder")
    job = json.loads(text)
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
        sys.exit(f"sbatch: {found.stderr.strip() or found.stdout.strip()}")
    sys.stderr.write(found.stderr)  # what the site says of the job: its cost, a changed partition
    print(job_number(found.stdout))


def job_number(said: str) -> str:
    """The job's id in the output of `sbatch --parsable`: ID or ID;CLUSTER, after a site's own messages.
    Raises SystemExit if there is none."""
    for line in reversed(said.splitlines()):
        if found := re.fullmatch(r"(\d+)(;\S*)?", line.strip()):
            return found[1]
    sys.exit(f"sbatch ended well and named no job; `squeue --me` shows whether there is one: {said.strip()}")


if __name__ == "__main__":
    main()
