"""Slurm submission: ``bapo submit RECIPE --cluster FILE [--dry-run] [--force] [--rehearse] [flags]``.

``submit`` checks the job, submits it and returns its id; with ``--dry-run`` it returns the script and writes
no file. The submission runs ``slurm/launch.py`` as a child process, in an interpreter that has NeMo-Run.
Raises ConfigError if a check or the submission fails.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bapo_megatron.commands.cluster.cluster_file import load_cluster
from bapo_megatron.commands.cluster.job import ClusterJob, check_job
from bapo_megatron.commands.cluster.run_job import LIVE_STATES, queue_state, read_job_state
from bapo_megatron.commands.recipe_flags import check_names
from bapo_megatron.commands.train_flags import train_flags
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths

USAGE = "usage: bapo submit RECIPE --cluster FILE [--dry-run] [--force] [--rehearse] [flags of bapo train]"
PYTHON_VARIABLE = "BAPO_NEMO_RUN_PYTHON"
_TEMPLATES = Path(__file__).parents[3] / "slurm"


@dataclass(frozen=True)
class SubmitCommand:
    """Command line of ``bapo submit``, parsed by ``of``: recipe, cluster file, switches, the other flags."""

    recipe: Path
    cluster: Path
    dry_run: bool
    force: bool
    flags: tuple[str, ...]
    """Flags of `bapo train`."""
    rehearse: bool = False
    """Whether to rehearse the ranks first, and reject the job if one fails or does not fit."""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> SubmitCommand:
        """Parse the command line. Raises ConfigError without a recipe or cluster file."""
        if not arguments or arguments[0].startswith("-"):
            raise ConfigError(f"{USAGE}; the recipe comes first")
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--cluster", nargs="?", type=Path)
        for switch in ("--dry-run", "--force", "--rehearse"):
            parser.add_argument(switch, action="store_true")
        own, flags = parser.parse_known_args(arguments[1:])
        if own.cluster is None:
            raise ConfigError(f"{USAGE}; slurm/clusters/ has examples of FILE")
        return cls(recipe=Path(arguments[0]), flags=tuple(flags), **vars(own))


def submit_command(arguments: Sequence[str]) -> None:
    """``bapo submit RECIPE --cluster FILE``: submit a run as a Slurm job, or print its script."""
    if {"-h", "--help"} & set(arguments):
        print(f"{USAGE}\n\n`bapo train RECIPE --help` lists the flags; docs/slurm.md the file's keys.")
        return
    command = SubmitCommand.of(arguments)
    config, _, fork = train_flags("submit", [str(command.recipe), *command.flags])
    from bapo_megatron.checkpoint.fork import check_fork  # imports torch, which usage and flags do not need

    check_fork(config, fork)
    print(job := submit(command, config, fork.run if fork else None), end="", flush=True)
    # Only the job id goes to stdout, for scripts; hints for people go to stderr.
    if not command.dry_run:
        run = shlex.quote(str(Path.cwd() / config.directory))
        print(
            f"job {job.strip()} is submitted; run directory {run}\n"
            f"bapo status {run}    # state, step, last error\n"
            f"bapo logs {run}      # once it runs; --follow\n"
            f"bapo cancel {run}    # save, stop, do not come back",
            file=sys.stderr,
        )


def submit(command: SubmitCommand, config: RunConfig, forked: Path | None = None) -> str:
    """Submit the job to Slurm; return its id, or with ``dry_run`` the script. Warnings go to stderr. Raises
    ConfigError if a check fails or the job cannot be submitted from here. ``forked``: the run of `--fork`."""
    if not _TEMPLATES.is_dir():
        raise ConfigError(
            f"{_TEMPLATES} does not exist: `bapo submit` works from a checkout of the project, installed "
            f"with `pip install -e`"
        )
    config.check()
    check_names(config)
    recipe = command.recipe.absolute()
    cluster = load_cluster(command.cluster)
    job = ClusterJob(config, cluster, recipe, command.flags, Path.cwd(), _TEMPLATES, forked)
    for warning in check_job(job, command.force, command.rehearse, command.dry_run):
        print(f"warning: {warning}", file=sys.stderr)
    if command.dry_run:
        print("\n".join(job.summary()), file=sys.stderr)
    elif live := _live_job(job):
        print(f"warning: {live}", file=sys.stderr)
    return launch(job, command.dry_run)


def _live_job(job: ClusterJob) -> str | None:
    """Return a warning if, by Slurm's answer, another job of the run is live."""
    run, other = job.run_dir, read_job_state(job.run_dir)
    state = (queue_state(other.job) or ("", ""))[0] if other else ""
    if not other or state not in LIVE_STATES:
        return None
    stop = f"`bapo cancel {shlex.quote(str(run))}` lets it save and stop"
    return f"job {other.job} of {run} is {state}: {stop}; of two jobs of a run the second stops"


def launch(job: ClusterJob, dry_run: bool) -> str:
    """Run `slurm/launch.py`; return its standard output, the job id or script. Unless ``dry_run``, records
    the id in the run directory, for `bapo status`, and prints warnings. Raises ConfigError if it fails."""
    if not dry_run:
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "there is no sbatch on this machine: submit on a login node of the cluster; --dry-run prints "
                "the job here"
            )
        # Before the submission: launch.py writes the script there, and Slurm opens the job's log there.
        RunPaths(job.run_dir).logs.mkdir(parents=True, exist_ok=True)
    command = [nemo_run_python(), str(job.templates / "launch.py"), *(["--dry-run"] if dry_run else [])]
    specification = job.specification()
    environment, left_out = submission_environment(
        os.environ, specification["settings"], job.templates / "lib"
    )
    if left_out and not dry_run:
        print(
            f"warning: {', '.join(left_out)} of this shell: not handed on to the job, whose cluster file "
            f"decides ([environment] has variables of its tasks, [sbatch] more flags)",
            file=sys.stderr,
        )
    completed = subprocess.run(
        command, input=json.dumps(specification), capture_output=True, text=True, env=environment
    )
    if completed.returncode:
        raise ConfigError(f"the job was not submitted:\n{(completed.stderr or completed.stdout).strip()}")
    for line in completed.stderr.splitlines():
        if line.startswith("sbatch:"):  # the site's messages; NeMo-Run warns about unused features
            print(printable(line), file=sys.stderr)
    if not dry_run:
        try:
            write_atomically(RunPaths(job.run_dir).submitted_job, completed.stdout)
        except OSError as error:  # Slurm has the job, so this must not look like a failure
            why = f"{error}: `bapo status` and `bapo cancel` know the job only once it has begun"
            print(f"warning: {why}", file=sys.stderr)
    return completed.stdout


def nemo_run_python() -> str:
    """Return an interpreter that has NeMo-Run: ``BAPO_NEMO_RUN_PYTHON``, this one, or `make nemo-run`'s.
    Raises ConfigError without one."""
    if named := environment_variable(PYTHON_VARIABLE):
        if not Path(named).is_file():
            raise ConfigError(f"{PYTHON_VARIABLE}={named} does not exist")
        return named
    if find_spec("nemo_run") is not None:
        return sys.executable
    own = _TEMPLATES.parent / ".venv-nemo-run/bin/python"
    if own.is_file():
        return str(own)
    raise ConfigError(
        f"NeMo-Run is not installed: `make nemo-run` installs it into .venv-nemo-run; an environment "
        f"elsewhere is named by {PYTHON_VARIABLE}. `sbatch slurm/train.sbatch` needs none of it"
    )


_OF_CLIENTS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_SACK_KEY")
"""Slurm variables that locate and authenticate its controller, not a job's settings."""
_OF_CONTAINERS = tuple(f"PYXIS_CONTAINER_{name}" for name in ("IMAGE", "MOUNTS", "WORKDIR", "NAME", "SAVE"))
"""pyxis defaults for every srun, even of a job without a container."""
_OF_JOBS = ("SLURM_", "SLURMD_", "SRUN_")


def submission_environment(
    shell: Mapping[str, str], settings: Container[str], library: Path
) -> tuple[dict[str, str], list[str]]:
    """Return the environment for a submission, and the names of removed variables that a user may miss.

    ``sbatch`` passes its environment to the job, where unrelated variables would silently take effect: sbatch
    defaults (which override the script's header), variables of the job around this shell (Slurm 24.11 rejects
    two different SLURM_CPUS_PER_TASK), and settings for plain sbatch. ``shell``: the command's environment.
    ``settings``: names that the job's script sets itself. ``library``: the folder ``slurm/lib``, whose
    ``settings.sh`` names all job settings.
    """
    of_plain_sbatch = {"BAPO_DEVICE", *re.findall(r"(?m)^(BAPO_\w+)=", (library / "settings.sh").read_text())}
    in_a_job = "SLURM_JOB_ID" in shell
    kept, left_out = {}, []
    for name, value in shell.items():
        if in_a_job and name.startswith(_OF_JOBS) and name not in _OF_CLIENTS:
            continue
        # NeMo-Run's environment has other package versions, which PYTHONPATH would mix in.
        if name == "PYTHONPATH" or name in of_plain_sbatch or name.startswith(("SBATCH_", *_OF_CONTAINERS)):
            if name not in settings:
                left_out.append(name)
            continue
        kept[name] = value
    return kept, sorted(left_out)
