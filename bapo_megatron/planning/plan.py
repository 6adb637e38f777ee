"""Plan of a job: ``make_plan`` returns the ``JobPlan`` with all estimates, ``summary`` its five-line text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from bapo_megatron.planning.engine_states import STATE_SLOTS
from bapo_megatron.planning.engines import EnginePlan, engine_plan
from bapo_megatron.planning.job import GB, GPUS_PER_NODE, Job
from bapo_megatron.planning.memory import StageMemory, host_bytes, stage_memory
from bapo_megatron.planning.sizes import steps_of_rollouts
from bapo_megatron.planning.speed import (
    Handover,
    Speed,
    handover_estimate,
    host_update_seconds,
    reference_seconds,
    speed,
)
from bapo_megatron.planning.traffic import Sync, Traffic, sync_traffic, update_traffic


@dataclass(frozen=True)
class Verdict:
    """Whether a job fits: the reasons against it as text, none if it ``fits``, by estimate or rehearsal."""

    memory: tuple[str, ...]
    """Exceeded memory limits, and failed ranks."""
    others: tuple[str, ...] = ()
    """In a plan, engines that hold no sequence; in a rehearsal, deadlocks."""

    @property
    def problems(self) -> list[str]:
        return [*self.memory, *self.others]

    @property
    def fits(self) -> bool:
        return not self.problems


def gpu_excess(job: Job, who: str, size: float, when: str) -> Iterator[str]:
    """Yield a line if a stage or rank exceeds a GPU's budget."""
    if size > job.budget:
        yield f"{who} needs {size / GB:.1f} GB {when}; a GPU may use {job.budget / GB:.1f}"


def host_excess(job: Job, size: float, when: str = "") -> Iterator[str]:
    """Yield a line if a node exceeds its host memory budget."""
    if size > job.host_budget:
        yield f"a node's host needs {size / GB:.0f} GB{when}; it may use {job.host_budget / GB:.0f}"


@dataclass(frozen=True)
class JobPlan:
    """Plan of one job: memory of each stage and of a node's host (bytes), speed, traffic, engines; as
    properties seconds of a step and of the run, bytes on disk, and the ``verdict`` on whether it fits."""

    job: Job
    stages: list[StageMemory]
    speed: Speed
    traffic: list[Traffic]
    sync: Sync
    engines: EnginePlan
    host: float
    """Host memory of a node during a save, bytes."""
    stepping_seconds: float
    """Seconds of a host optimizer step; 0 on the GPU."""
    handover: Handover | None
    """GPU hand-overs between training and sampling; None if servers are not colocated."""

    @property
    def train_seconds(self) -> float:
        """Seconds of a step's updates and reference swaps; the first update skips passes for known ratios."""
        updates = self.job.updates * (self.speed.update_seconds + self.stepping_seconds)
        return updates - self.speed.known_seconds + reference_seconds(self.job)

    @property
    def sampling_seconds(self) -> float:
        """Sampling seconds of a step: until its last response, or with partial rollout at full batches; 0 for
        a replay."""
        if not self.job.samples:
            return 0.0
        return self.engines.step_seconds if self.job.partial_rollout else self.engines.rollout_seconds

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of a step with the weight sync; sampling and training alternate or overlap."""
        changing = self.handover.seconds if self.handover else 0.0
        both = (self.sampling_seconds, self.train_seconds)
        return (max(both) if self.job.overlaps else sum(both)) + self.sync.expected_seconds + changing

    @property
    def trainer_nodes(self) -> int:
        return -(-self.job.gpus // GPUS_PER_NODE)

    @property
    def server_nodes(self) -> int:
        """Nodes of rollout servers besides the trainer's; 0 if the servers fit there."""
        return -(-self.engines.gpus // GPUS_PER_NODE) if self.job.servers_problem else 0

    @property
    def run_seconds(self) -> float:
        return self.job.run.steps * self.step_seconds

    @property
    def checkpoint_seconds(self) -> float:
        """Estimated seconds between checkpoints, or to the only one."""
        return min(self.job.run.steps, self.job.run.checkpoint.every) * self.step_seconds

    @property
    def peak(self) -> float:
        """Peak bytes of training on a GPU, with what colocated servers keep."""
        return max(stage.policy_peak + stage.kept for stage in self.stages)

    @property
    def cost(self) -> float:
        """GPU-seconds per token, no communication hidden; ``bapo plan`` ranks layouts by it."""
        busy = self.speed.update_seconds + self.speed.link_seconds + self.stepping_seconds
        return busy / self.speed.update_seconds / self.speed.tokens_per_second

    @cached_property
    def verdict(self) -> Verdict:
        return Verdict(tuple(self._misfits()), tuple(filter(None, [self._engine_problem()])))

    def _misfits(self) -> Iterator[str]:
        for memory in self.stages:
            beside = f", {memory.kept / GB:.1f} of them a server's" if memory.kept else ""
            server = (memory.kept + memory.reading) / GB
            read = f"while servers read the weights, {server:.1f} of them a server's"
            phases = {
                f"in an update{beside}": memory.training + memory.kept,
                f"while saving{beside}": memory.saving + memory.kept,
                f"while syncing weights{beside}": memory.syncing + memory.kept,
                read: memory.handover,
                f"while engines sample, {memory.resting / GB:.1f} of them the policy's": memory.sampling,
            }
            for phase, used in phases.items():
                yield from gpu_excess(self.job, f"stage {memory.stage}", used, phase)
        yield from host_excess(self.job, self.host, " while saving")

    def _engine_problem(self) -> str | None:
        """Return the problem, with its fix, of engines too small for the longest sequence, else None."""
        if self.engines.fits or not self.job.samples:
            return None
        states = self.engines.states
        if states and not states.requests:
            return (
                f"an engine's {states.slots} slots for states are fewer than the {states.per_request} of one "
                f"request: raise {STATE_SLOTS}, or rollout.sglang.memory_fraction"
            )
        if not self.engines.count:
            return "there are fewer --engine-gpus than rollout.sglang.tensor"
        longest = self.job.run.longest_sequence
        return f"an engine's KV cache holds no sequence of {longest} tokens: raise rollout.sglang.tensor"


def make_plan(job: Job) -> JobPlan:
    """Return the plan of ``job``. Arithmetic only: no GPU, weights or processes."""
    return JobPlan(
        job=job,
        stages=[stage_memory(job, stage) for stage in range(job.parallel.pipeline)],
        speed=speed(job),
        traffic=update_traffic(job),
        sync=sync_traffic(job),
        engines=engine_plan(job),
        host=host_bytes(job),
        stepping_seconds=host_update_seconds(job),
        handover=handover_estimate(job),
    )


def summary(plan: JobPlan, nodes: str | None = None) -> Iterator[str]:
    """Yield a plan's summary in five lines: fit, nodes, step time, first checkpoint, disk. ``nodes``: text
    for a cluster file's nodes, in place of the plan's own."""
    job, run = plan.job, plan.job.run
    verdict = "FITS" if plan.verdict.fits else "DOES NOT FIT"
    yield (
        f"{verdict}: at most {_peaks(plan)} of a GPU's {job.gpu.memory / GB:.0f} ({job.gpu.name}), "
        f"{plan.host / GB:,.0f} GB of a node's {job.gpu.host_memory / GB:,.0f}"
    )
    yield f"Nodes: {nodes or _nodes(plan)}"
    first = f"First checkpoint: step {min(run.steps, run.checkpoint.every)}"
    if isfinite(plan.step_seconds):
        yield (
            f"Step: {plan.step_seconds:,.0f} s: training {plan.train_seconds:,.0f} s, {_sampling(plan)}; "
            f"{run.steps} steps take {duration(plan.run_seconds)} (estimates)"
        )
        yield f"{first}, after {duration(plan.checkpoint_seconds)}"
    else:
        yield "Step: no estimate, for no engine can sample"
        yield first
    yield (
        f"Disk: {job.disk / GB:,.0f} GB for checkpoints and weights, {job.rollouts / GB:,.0f} GB for the "
        f"rollouts of {steps_of_rollouts(run)} steps; logs come on top"
    )


def _sampling(plan: JobPlan) -> str:
    if not plan.job.samples:
        return "no sampling (rollout.replay)"
    beside = " beside it" if plan.job.overlaps else ""
    changes = f"changes {plan.handover.seconds:,.0f} s" if plan.handover else ""
    sync = changes or f"sync {plan.sync.expected_seconds:,.0f} s"
    return f"sampling {plan.sampling_seconds:,.0f} s{beside}, {sync}"


def nodes_text(train: int, sample: int) -> str:
    """Return a job's nodes as text: `8 train + 8 sample = 16`."""
    return f"{train} train" + (f" + {sample} sample = {train + sample}" if sample else "")


def duration(seconds: float) -> str:
    """Return a duration in a suitable unit: seconds, minutes, hours or days."""
    for size, name, digits in ((86400, "days", 1), (3600, "h", 1), (60, "minutes", 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {name}"
    return f"{seconds:,.0f} s"


def _peaks(plan: JobPlan) -> str:
    if not plan.job.colocated:
        return f"{max(stage.peak for stage in plan.stages) / GB:.1f} GB"
    sample = max(max(stage.sampling, stage.handover) for stage in plan.stages)
    return f"{plan.peak / GB:.1f} GB (training) and {sample / GB:.1f} GB (sampling)"


def _nodes(plan: JobPlan) -> str:
    job, engines = plan.job, plan.engines
    if job.servers_problem:  # `bapo train` alone would reject it
        return (
            f"{nodes_text(plan.trainer_nodes, plan.server_nodes)}; servers need nodes of their own: "
            f"rollout_nodes in a cluster file, or sglang.urls"
        )
    if job.run.rollout.engine != "sglang" or job.run.rollout.sglang.urls or not job.samples:
        return nodes_text(plan.trainer_nodes, 0)
    if job.colocated:
        first = "of the first " * (plan.trainer_nodes > 1)
        return f"{plan.trainer_nodes}, where {job.gpus} GPUs train and {engines.gpus} {first}sample, in turns"
    if job.gpus + engines.gpus <= GPUS_PER_NODE:
        return f"1, of whose GPUs {job.gpus} train and {engines.gpus} sample"
    return f"{nodes_text(plan.trainer_nodes, 0)}; {engines.gpus} GPUs of the first sample"
