"""Slurm job of a recipe, ``ClusterJob``: node groups, environment variables, and checks before submission.

For `submit.py`; nothing here calls Slurm. ``check_job`` returns warnings and raises ConfigError if the job
cannot work; ``ClusterJob.specification`` returns the JSON object that ``slurm/launch.py`` submits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.commands.cluster.cluster_file import ClusterFile
from bapo_megatron.config import RunConfig
from bapo_megatron.data.prepare.options import SUITES
from bapo_megatron.data.problem_sets import suite_path
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import GB, Job, PlanOptions, find_shape
from bapo_megatron.planning.memory import host_bytes
from bapo_megatron.planning.plan import make_plan, nodes_text, summary
from bapo_megatron.planning.sizes import total_parameters
from bapo_megatron.rollout.engines.pool_state import load_seconds, read_seconds
from bapo_megatron.rollout.engines.sglang.requirements import placement_problem

_REHEARSE = (sys.executable, "-m", "bapo_megatron.cli", "rehearse")
_TO_SLURM = ("account", "partition", "time", "qos", "constraint", "cpus_per_task", "mem")


@dataclass(frozen=True)
class ClusterJob:
    """Slurm job of one recipe with its flags at the site of a cluster file. Properties are its nodes and
    processes; methods return its problems and warnings as text, its environment variables and its
    specification. Immutable; reads files. Only ``rehearsal_misfits`` starts processes, for minutes."""

    config: RunConfig
    cluster: ClusterFile
    recipe: Path
    flags: tuple[str, ...]
    """Flags of `bapo train` as given."""
    root: Path
    """Submission folder, to which the recipe's relative paths refer."""
    templates: Path
    """Folder `slurm/` of the checkout."""
    forked: Path | None = None
    """Run at whose checkpoint this one begins (`--fork`)."""

    @property
    def tasks_per_node(self) -> int:
        """Trainer processes per node."""
        return self.cluster.tasks_per_node or max(1, self.cluster.gpus_per_node)

    @property
    def trainer_nodes(self) -> int:
        replicas = self.config.parallel.data or 1
        needed = -(-self.config.parallel.model_size * replicas // self.tasks_per_node)
        return self.cluster.trainer_nodes or needed

    @property
    def rollout_nodes(self) -> int:
        """Nodes of SGLang servers; 0 for colocated servers, which use the trainer's GPUs, and a replay."""
        return 0 if self.why_no_rollout_nodes else self.cluster.rollout_nodes

    @property
    def why_no_rollout_nodes(self) -> str | None:
        """Return why the job takes no rollout nodes, whatever the cluster file says; None if it may."""
        if self.config.rollout.replay is not None:
            return "a replay samples nothing (rollout.replay)"
        if self.config.rollout.sglang.colocated:
            return "the recipe's servers are on the GPUs that train (rollout.sglang.colocated)"
        return None

    @property
    def processes(self) -> int:
        """Ranks of the trainer."""
        return self.trainer_nodes * self.tasks_per_node

    @property
    def servers_per_node(self) -> int:
        """SGLang servers per rollout node."""
        tensor = self.config.rollout.sglang.tensor
        return self.cluster.servers_per_node or max(1, self.cluster.gpus_per_node // tensor)

    @property
    def run_dir(self) -> Path:
        """Absolute run directory."""
        return self.root / self.config.directory

    def problems(self) -> Iterator[str]:
        """Yield contradictions between recipe and cluster file that make the job impossible."""
        size, data = self.config.parallel.model_size, self.config.parallel.data
        if self.processes % size:
            yield (
                f"{self.trainer_nodes} trainer nodes of {self.tasks_per_node} tasks are {self.processes} "
                f"processes, no multiple of the {size} that hold one replica (parallel.tensor x pipeline x "
                f"context): change trainer_nodes in the cluster file, or the layout"
            )
        elif data is not None and data * size != self.processes:
            yield (
                f"parallel.data={data} needs {data * size} processes, and {self.trainer_nodes} nodes have "
                f"{self.processes}: change trainer_nodes or tasks_per_node in the cluster file, or leave "
                f"parallel.data out"
            )
        tensor = self.config.rollout.sglang.tensor
        if self.rollout_nodes and self.cluster.gpus_per_node % tensor:
            yield (
                f"rollout.sglang.tensor={tensor} does not divide gpus_per_node={self.cluster.gpus_per_node} "
                f"of the cluster file"
            )
        servers, gpus = self.cluster.servers_per_node or 0, self.cluster.gpus_per_node
        if self.rollout_nodes and 0 < gpus < servers * tensor:
            yield (
                f"servers_per_node = {servers} of rollout.sglang.tensor={tensor} GPUs each need "
                f"{servers * tensor}, and gpus_per_node = {gpus}: lower servers_per_node in the cluster "
                f"file, or leave it out"
            )
        if self.rollout_nodes and self.config.rollout.sglang.urls:
            yield "rollout.sglang.urls names servers, and the job starts others: set rollout_nodes = 0"
        rollout, elsewhere = self.config.rollout, "BAPO_ENGINES" in self.cluster.environment
        if rollout.engine != "sglang" or rollout.replay or self.rollout_nodes or elsewhere or not gpus:
            return
        if problem := placement_problem(rollout, gpus, min(self.processes, self.tasks_per_node)):
            yield (
                f"rollout_nodes = 0, and the recipe's SGLang servers need nodes of their own: set "
                f"rollout_nodes in the cluster file, or name servers that run already with "
                f"--rollout.sglang.urls ({problem})"
            )

    def missing_mounts(self) -> list[str]:
        """Return a message, with the mount to add, for each path that tasks need and the container lacks.
        Tasks use the host's paths, so a mount counts only if both sides are equal."""
        if self.cluster.container is None:
            return []
        places = [[Path(side) for side in mount.split(":")[:2]] for mount in self.cluster.mounts]
        # An input absent here may be in the image or at another host path: that is only a warning.
        inputs = {
            what: path
            for what, path in self._inputs().items()
            if os.path.exists(path) and not any(path.is_relative_to(inside) for _, inside in places)
        }
        shown, missing = [host for host, inside in places if host == inside], []
        paths = {
            "folder of the submission": self.root,
            "checkout": self.templates.parent,
            "run directory": self.run_dir,
            "recipe": self.recipe,
        }
        for what, path in (paths | inputs).items():
            if not any(path.is_relative_to(folder) for folder in shown):
                folder = path.parent if what == "recipe" or path.is_file() else path
                line = f'the container does not mount the {what} {path}: add "{folder}:{folder}" to mounts'
                missing.append(line)
                shown.append(folder)  # covers the paths below it, too
        return missing

    def _inputs(self) -> dict[str, Path]:
        """Return paths of the data that tasks read, by role. A replay reads no prompts."""
        config = self.config
        needed = {"model": config.model.hf_path}
        if config.algorithm.reference_kl.model is not None:
            needed["reference's model"] = config.algorithm.reference_kl.model
        if self.forked is not None:
            needed["forked run"] = self.forked
        if config.rollout.replay is not None:
            needed["replayed run"] = config.rollout.replay
        else:
            for source in config.data.files:
                needed[f"data file of {source.name}" if config.data.sources else "data file"] = source.path
        for suite in config.evaluation.suites if config.evaluation.every else ():
            with suppress(ConfigError):  # it is absent here
                needed[f"suite {suite}"] = suite_path(suite, SUITES)
        return {what: self.root / path for what, path in needed.items()}

    def summary(self) -> list[str]:
        """Return the lines of `bapo plan`, or just the nodes if the GPU type or the model's config.json is
        unknown."""
        nodes = nodes_text(self.trainer_nodes, self.rollout_nodes)
        try:
            plan = make_plan(self.planned())
            return list(summary(plan) if plan.job.colocated else summary(plan, nodes))
        except ConfigError as error:
            return [f"Nodes: {nodes}", f"No plan: {error}"]

    def warnings(self) -> Iterator[str]:
        """Yield warnings, which do not prevent submission."""
        yield from self._absent_inputs()
        if self.cluster.health.probe == "on":
            yield from self._low_needs()
        if self.rollout_nodes and self._load_seconds() is None:
            yield (
                "how long servers read the weights is unknown, for this machine has neither them nor the "
                "model's config.json: servers that are not ready after engines_wait_s are given up; raise it"
            )
        if self.cluster.rollout_nodes and (why := self.why_no_rollout_nodes):
            yield f"rollout_nodes = {self.cluster.rollout_nodes} of the cluster file is left out: {why}"

    def _low_needs(self) -> Iterator[str]:
        """Yield warnings if the health check asks the nodes for less than the run needs."""
        job, disk = self._sized(), self.cluster.health.disk_gb
        if job and disk < (need := (job.disk + job.rollouts) / GB):
            yield (
                f"the run's folder needs {need:,.0f} GB by `bapo plan`, and the probe asks the nodes for "
                f"{disk:g}: set health.disk_gb = {math.ceil(need)} in the cluster file"
            )
        try:
            planned, asked = self.planned(), self.cluster.health.memory_gb
        except ConfigError:  # no GPU type, or no config.json
            return
        # The plan's nodes have eight GPUs; the cluster's may have fewer ranks.
        memory = host_bytes(planned) / GB * self.tasks_per_node / planned.gpus_on_node
        if asked < memory:
            yield (
                f"a node needs {memory:,.0f} GB of host memory while it saves by `bapo plan`, and the probe "
                f"asks for {asked:g}: set health.memory_gb = {math.ceil(1.2 * memory)} in the cluster file"
            )

    def _absent_inputs(self) -> Iterator[str]:
        data, model = self.config.data, self.root / self.config.model.hf_path
        if not (model / "config.json").is_file():
            yield f"model.hf_path: {model} has no config.json on this machine; the nodes must have the model"
        for source in data.files if self.config.rollout.replay is None else ():
            field = f"data.sources[{source.name}]" if data.sources else "data.path"
            if not (path := self.root / source.path).exists():
                yield f"{field}: {path} is absent on this machine; the nodes must have it (docs/data.md)"

    def _load_seconds(self) -> float | None:
        """Return a server's load time for the weights in seconds, from the weights or config.json; None
        without both."""
        with suppress(ConfigError):
            if seconds := load_seconds(self.root / self.config.model.hf_path, 0.0):
                return seconds
        job = self._sized()
        return read_seconds(total_parameters(job.shape) * job.element) if job else None

    def _sized(self) -> Job | None:
        """Return the recipe's job, for sizes; None without the model's config.json."""
        with suppress(ConfigError):
            return Job(self.config, find_shape(self.recipe, self.config.model.hf_path), PlanOptions())
        return None

    def misfits(self) -> list[str]:
        """Return why the recipe does not fit by `bapo plan`; without rollout nodes only memory is judged.
        Empty without a `gpu`. Raises ConfigError without the model's config.json."""
        if self.cluster.gpu is None:
            return []
        plan = make_plan(self.planned())
        return plan.verdict.problems if self.rollout_nodes else list(plan.verdict.memory)

    def rehearsal_misfits(self) -> list[str]:
        """Return why the recipe does not run or fit, from a rehearsal of one rank of each kind (minutes).
        Raises ConfigError if the rehearsal ends without a result."""
        planned = self.planned()
        layout = ("--parallel.data", str(planned.run.parallel.data), "--gpu", planned.options.gpu)
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            page = Path(folder) / "rehearsal.json"
            recipe = (str(self.recipe), *self.flags)
            command = [*_REHEARSE, *recipe, *layout, "--json", str(page)]
            code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
            if not page.exists():
                raise ConfigError(f"the rehearsal ends with exit code {code}, without a result; see above")
            misfits: list[str] = json.loads(page.read_text())["misfits"]
        return misfits

    def planned(self) -> Job:
        """Return the ``Job`` to plan: the recipe on this job's ranks and rollout nodes. Raises ConfigError
        if the cluster file does not name its GPUs."""
        if self.cluster.gpu is None:
            raise ConfigError("the cluster file does not say which `gpu` its nodes have: add it")
        replicas = self.processes // self.config.parallel.model_size
        parallel = dataclasses.replace(self.config.parallel, data=max(1, replicas))
        run = dataclasses.replace(self.config, parallel=parallel)
        options = PlanOptions(
            gpu=self.cluster.gpu,
            engine_gpus=self.rollout_nodes * self.cluster.gpus_per_node or None,
        )
        return Job(run, find_shape(self.recipe, run.model.hf_path), options)

    def settings(self) -> dict[str, str]:
        """Return the job's environment variables: of `slurm/lib/settings.sh` and the cluster file."""
        cluster, budgets, health = self.cluster, self.cluster.budgets, self.cluster.health
        settings = {
            "BAPO_ROOT": self.root,
            "BAPO_SLURM": self.templates,
            "BAPO_PYTHON": cluster.python,
            "BAPO_MODULES": " ".join(cluster.modules),
            "BAPO_LEAD_S": cluster.lead_s,
            "BAPO_MARGIN_S": cluster.margin_s,
            "BAPO_WAIT_S": cluster.wait_s,
            "BAPO_CRASH_WAIT_S": cluster.crash_wait_s,
            "BAPO_MAX_CRASHES": budgets.crash,
            "BAPO_MAX_PREEMPTIONS": budgets.preemption,
            "BAPO_MAX_TIME_LIMITS": budgets.time_limit,
            "BAPO_MAX_NODE_FAILURES": budgets.node_failure,
            "BAPO_SERVERS_PER_NODE": self.servers_per_node,
            "BAPO_SERVER_GPUS": self.config.rollout.sglang.tensor,
            "BAPO_ENGINES_WAIT_S": cluster.engines_wait_s,
            "BAPO_ENGINES_LOAD_S": int(self._load_seconds() or 0.0),
            "BAPO_LOOK_S": cluster.look_s,
            "BAPO_HEALTH": health.probe,
            "BAPO_HEALTH_WAIT_S": health.wait_s,
            "BAPO_HEALTH_FLAGS": (
                f"--memory-gb {health.memory_gb:g} --disk-gb {health.disk_gb:g} --clock-s {health.clock_s:g}"
            ),
        }
        inside = dict(cluster.environment)
        if cluster.sglang_python is not None:
            inside = {"BAPO_SGLANG_PYTHON": cluster.sglang_python} | inside
        if cluster.container is not None:
            settings |= {"BAPO_CONTAINER": cluster.container, "BAPO_MOUNTS": ",".join(cluster.mounts)}
            # Under pyxis the image's variables override the job's; task.sh sets these again.
            settings["BAPO_TASK_SETTINGS"] = "\n".join(
                f"export {name}={shlex.quote(value)}" for name, value in inside.items()
            )
        return {name: str(value) for name, value in settings.items()} | inside

    def groups(self) -> list[dict[str, Any]]:
        """Return the node groups: the trainer's, then the rollout servers'."""
        cores, tasks = self.cluster.cpus_per_task, self.tasks_per_node
        groups = [{"role": "trainer", "nodes": self.trainer_nodes, "tasks": tasks, "cpus_per_task": cores}]
        if self.rollout_nodes:
            # A rollout node's one task has all its servers: give it the cores of a node's ranks.
            cores = cores and cores * tasks
            groups += [{"role": "rollout", "nodes": self.rollout_nodes, "tasks": 1, "cpus_per_task": cores}]
        return groups

    def specification(self) -> dict[str, Any]:
        """Return the job's specification for `slurm/launch.py`."""
        cluster = self.cluster
        # The run directory is absolute: nodes may see another working directory. The last of two counts.
        words = [str(self.recipe), *self.flags, "--run-dir", str(self.run_dir)]
        return {
            "name": f"bapo-{self.config.name}".replace("/", "-"),  # part of the log's file name
            "run": str(self.run_dir),
            "root": str(self.root),
            "templates": str(self.templates),
            "arguments": shlex.join(words),
            "groups": self.groups(),
            "settings": self.settings(),
            "gpus_per_node": cluster.gpus_per_node,
            "lead_s": cluster.lead_s,
            "slurm": {name: getattr(cluster, name) for name in _TO_SLURM}
            | {"exclusive": cluster.exclusive or None},
            "sbatch": cluster.sbatch,
            "container": cluster.container,
            "mounts": list(cluster.mounts),
        }


def check_job(job: ClusterJob, force: bool, rehearse: bool = False, dry_run: bool = False) -> list[str]:
    """Check the job before submission; return the warnings. Raises ConfigError if the job cannot work.

    ``force`` turns misfits (of plan and rehearsal) into warnings, ``rehearse`` adds a rehearsal, ``dry_run``
    turns missing mounts into warnings, since the checkout may be at another place here.
    """
    # Cheapest first: a rehearsal takes minutes.
    unmounted = job.missing_mounts()
    if problems := [*job.problems(), *(unmounted if not dry_run else [])]:
        raise ConfigError("\n".join(problems))

    def accepted(misfits: list[str], says: str, hint: str) -> list[str]:
        if misfits and not force:
            told = [f"{job.recipe} {says} {job.cluster.gpu}:", *misfits, hint]
            raise ConfigError("\n".join(told) + "; --force submits it all the same")
        return misfits

    misfits = accepted(
        job.misfits(), "does not fit", "`bapo plan` shows the smallest changes that make it fit"
    )
    if rehearse:
        says, hint = "was rehearsed and would not run on", "`bapo rehearse` shows where the memory goes"
        misfits += accepted(job.rehearsal_misfits(), says, hint)
    refused = [f"{line}; without --dry-run this is refused" for line in unmounted]
    return [*refused, *job.warnings(), *misfits]
