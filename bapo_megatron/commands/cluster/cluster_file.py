"""Cluster file: the TOML settings of a Slurm site, for ``bapo submit --cluster FILE``.

``load_cluster(path)`` returns a ``ClusterFile``. It raises one ConfigError for a missing or unreadable file,
or with all wrong names and types or, if there are none, all invalid values.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from bapo_megatron.algo.settings import out_of_range, table_problems
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import GpuName

_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d\d){1,2}|\d+-\d{1,2}|\d+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

_OF_THE_FILE = ("account", "partition", "time", "qos", "constraint", "mem", "cpus-per-task")
_OF_THE_JOB = (
    *("signal", "nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-task", "gpus-per-socket"),
    *("output", "error", "job-name", "open-mode", "requeue", "no-requeue", "no-kill"),
    *("array", "wrap", "wait", "test-only", "parsable"),
)
"""sbatch flags not allowed in the table ``sbatch``: keys of the file set them, or the job itself."""


@dataclass(frozen=True)
class Budgets:
    """Requeue budgets, the file's table ``budgets``: the maximum number of requeues over a job's whole life,
    for each kind of end: crash, preemption, time limit, node failure. The job's script counts them
    (slurm/lib/requeue.sh); beyond a budget the job stops."""

    crash: Annotated[int, Ge(0)] = 20
    """A failing GPU usually shows as a crash, not as a lost node: of 1,000 GPUs about ten in a month. A crash
    without a new checkpoint since the last requeue stops the job, whatever budget is left."""
    preemption: Annotated[int, Ge(0)] = 100
    time_limit: Annotated[int, Ge(0)] = 500
    node_failure: Annotated[int, Ge(0)] = 20


@dataclass(frozen=True)
class Health:
    """Health check of every node before a run starts (slurm/probe.py), the file's table ``health``: whether
    to run it, free memory and disk that a node needs, allowed clock difference, longest wait."""

    probe: Literal["on", "off"] = "on"
    memory_gb: Annotated[float, Ge(0)] = 1.0
    disk_gb: Annotated[float, Ge(0)] = 1.0
    clock_s: Annotated[float, Gt(0)] = 5.0
    """Largest difference between the nodes' clocks, seconds."""
    wait_s: Annotated[int, Ge(0)] = 600
    """Longest wait for the whole probe, in which each node unpacks its image, seconds."""


@dataclass(frozen=True)
class ClusterFile:
    """Content of a cluster file, such as ``slurm/clusters/*.toml``: account, partition and time limit, GPUs
    and nodes, container and interpreters, waiting times, environment variables, sbatch flags, requeue
    budgets, health checks."""

    account: str
    partition: str
    time: str
    """Time limit, as `sbatch --time` takes it."""
    gpus_per_node: Annotated[int, Ge(0)]
    gpu: GpuName | None = None
    """Kind of GPU for the verdict of `bapo plan`; None: no verdict."""
    qos: str | None = None
    constraint: str | None = None
    trainer_nodes: Annotated[int | None, Ge(1)] = None
    """Nodes that train. None: as many as the recipe's layout needs."""
    rollout_nodes: Annotated[int, Ge(0)] = 0
    """Nodes of SGLang servers beside the trainer's; 0: the recipe's own servers, or none."""
    tasks_per_node: Annotated[int | None, Ge(1)] = None
    """Trainer processes on a node. None: one for each GPU."""
    servers_per_node: Annotated[int | None, Ge(1)] = None
    """SGLang servers on a rollout node. None: `gpus_per_node` / `rollout.sglang.tensor`."""
    cpus_per_task: Annotated[int | None, Ge(1)] = None
    mem: str | None = None
    """Memory of a node, as `sbatch --mem` takes it."""
    exclusive: bool = False
    container: str | None = None
    """Image for pyxis; None: no container."""
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER, for pyxis."""
    modules: tuple[str, ...] = ()
    """Environment modules."""
    python: str = "python"
    """Interpreter with bapo-megatron on the nodes, inside the container if there is one."""
    sglang_python: str | None = None
    """Interpreter of SGLang's environment on the nodes."""
    lead_s: Annotated[int, Ge(1)] = 600
    """Time before the limit at which the ranks are told to save and stop."""
    margin_s: Annotated[int, Ge(0)] = 60
    """Time before the limit at which ranks that are still saving are killed. srun waits for ranks blocked by
    a file system, for Slurm's KillWait (30 s) and 2 s more; then the job must still be requeued. If `lead_s`
    is not above this default: half of `lead_s`."""
    wait_s: Annotated[int, Ge(1)] = 900
    """Longest wait for the other ranks, once the first has ended."""
    crash_wait_s: Annotated[int, Ge(1)] = 60
    """Longest wait for the other ranks, once one has failed. They would wait in a collective for hours."""
    engines_wait_s: Annotated[int, Ge(1)] = 1200
    """Longest wait for the rollout servers; then the run starts with those that are ready."""
    look_s: Annotated[int, Ge(1)] = 10
    """Interval between two health checks of the rollout servers."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every task."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """More flags of sbatch, for every group."""
    budgets: Budgets = field(default_factory=Budgets)
    health: Health = field(default_factory=Health)


def load_cluster(path: Path) -> ClusterFile:
    """Read the cluster file at ``path``. Raises ConfigError if it is missing, unreadable or invalid."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"cluster file {path} does not exist; slurm/clusters/ has examples") from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cluster file {path} cannot be read: {error}") from None
    problems = [f"{name}{problem}" for name, problem in table_problems(ClusterFile, table)]
    if not problems:
        parts = {"budgets": Budgets(**table.get("budgets", {})), "health": Health(**table.get("health", {}))}
        lists = {name: tuple(table.get(name, ())) for name in ("mounts", "modules")}
        cluster = ClusterFile(**table | parts | lists)
        problems = list(_invalid_values(cluster))
    if problems:
        raise ConfigError("\n".join(f"cluster file {path}: {problem}" for problem in problems))
    return cluster


def seconds_of(time: str) -> int:
    """Return a time limit in seconds as Slurm reads it: D-HH[:MM[:SS]], HH:MM:SS, MM:SS, or minutes."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    parts = [*parts, 0, 0][:3] if dash else [0, *parts, *[0] * (len(parts) == 1)][-3:]
    hours, minutes, seconds = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _invalid_values(cluster: ClusterFile) -> Iterator[str]:
    if not _TIME.fullmatch(cluster.time):
        yield f"time = {cluster.time!r} is not a time; write it as HH:MM:SS or D-HH:MM:SS"
    elif cluster.lead_s >= (limit := seconds_of(cluster.time)):
        yield (
            f"lead_s = {cluster.lead_s} must be below time = {cluster.time!r}, {limit} s: every start would "
            f"be told to stop at once; lower lead_s, or raise time"
        )
    yield from out_of_range(cluster, " = ")
    if cluster.margin_s >= cluster.lead_s and cluster.margin_s != ClusterFile.margin_s:
        yield f"margin_s = {cluster.margin_s} must be below lead_s = {cluster.lead_s}, the time to save"
    for mount in cluster.mounts:
        if ":" not in mount:
            yield f"mounts: {mount!r} must be HOST:CONTAINER"
    if cluster.mounts and cluster.container is None:
        yield "mounts are of a container, and there is none: set container, or leave them out"
    for name in cluster.environment:
        if not _NAME.fullmatch(name):
            yield f"environment.{name}: a variable's name has letters, digits and _ alone"
    yield from _invalid_flags(cluster)


def _invalid_flags(cluster: ClusterFile) -> Iterator[str]:
    """Yield problems of ``sbatch`` flags that conflict with the file or the job itself."""
    for name in cluster.sbatch:
        flag = name.replace("_", "-")
        if not _FLAG.fullmatch(flag):
            yield f"sbatch.{name!a} is not a flag of sbatch: write its name without dashes in front"
        elif flag in _OF_THE_FILE:
            yield f"sbatch.{name}: the key {flag.replace('-', '_')} of this file sets it"
        elif flag in _OF_THE_JOB:
            yield f"sbatch.{name}: a key of this file sets it, or the job itself (docs/slurm.md)"
        elif flag.startswith("container"):
            yield f"sbatch.{name}: the job's script runs outside of the container; set container, mounts"
