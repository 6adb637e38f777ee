"""Plan of a training job: memory of every stage, speed, traffic, engines, and the limits it exceeds.

``make_plan`` is called by ``bapo plan``, ``bapo submit`` and the layout search (``advice.py``). Used in
``commands/`` and this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from bapo_megatron.planning.engines import EnginePlan, engines
from bapo_megatron.planning.hardware import GB, GPUS_PER_NODE
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.memory import StageMemory, host_bytes, stage_memory
from bapo_megatron.planning.sizes import run_folder_bytes
from bapo_megatron.planning.speed import (
    Handover,
    HostUpdate,
    Speed,
    handover_estimate,
    host_update,
    reference_seconds,
    speed,
)
from bapo_megatron.planning.traffic import Sync, Traffic, sync_traffic, update_traffic
from bapo_megatron.planning.verdict import Verdict, gpu_excess, host_excess


@dataclass(frozen=True)
class JobPlan:
    """Plan of one job: estimated memory, speed, traffic and engines, as plain data with sums over it.

    Made by ``make_plan``, printed by ``page.py``.
    """

    job: Job
    stages: list[StageMemory]
    speed: Speed
    traffic: list[Traffic]
    sync: Sync
    engines: EnginePlan
    host: float
    """Bytes of host memory that a node needs while it saves."""
    host_update: HostUpdate | None
    """An optimizer step on the host; None if it is on the GPU."""
    handover: Handover | None
    """The GPU hand-overs between training and sampling; None if servers are not colocated."""

    @property
    def train_seconds(self) -> float:
        """Seconds that all updates of a step take, and the swaps with a frozen reference."""
        updates = self.job.updates * (self.speed.update_seconds + self.stepping_seconds)
        return updates + reference_seconds(self.job)

    @property
    def stepping_seconds(self) -> float:
        """Seconds of an optimizer step on the host; 0 on the GPU, where it is negligible."""
        return self.host_update.seconds if self.host_update else 0.0

    @property
    def sampling_seconds(self) -> float:
        """Sampling time of a step: until its last response is done; with partial rollout at full batches."""
        return self.engines.step_seconds if self.job.partial_rollout else self.engines.rollout_seconds

    @property
    def step_seconds(self) -> float:
        """Estimate of a step with the weight sync: sampling and training take turns, or overlap."""
        changing = self.handover.seconds if self.handover else 0.0
        both = (self.sampling_seconds, self.train_seconds)
        return (max(both) if self.job.overlaps else sum(both)) + self.sync.expected_seconds + changing

    @property
    def trainer_nodes(self) -> int:
        """Nodes that train."""
        return -(-self.job.gpus // GPUS_PER_NODE)

    @property
    def server_nodes(self) -> int:
        """Nodes of rollout servers beside the trainer's; 0 if the servers fit on the trainer's."""
        return -(-self.engines.gpus // GPUS_PER_NODE) if self.job.servers_problem else 0

    @property
    def run_seconds(self) -> float:
        """Estimate of the seconds of all steps of the run."""
        return self.job.run.steps * self.step_seconds

    @property
    def checkpoint_seconds(self) -> float:
        """Estimate of the seconds from one checkpoint to the next, the first included."""
        return min(self.job.run.steps, self.job.run.checkpoint.every) * self.step_seconds

    @property
    def disk(self) -> float:
        """Bytes that the run's folder needs, without rollouts and logs."""
        return run_folder_bytes(self.job.run, self.job.shape)

    @property
    def cost(self) -> float:
        """GPU-seconds for each token, with no communication hidden; ``bapo plan`` ranks layouts by it."""
        busy = self.speed.update_seconds + self.speed.link_seconds + self.stepping_seconds
        return busy / self.speed.update_seconds / self.speed.tokens_per_second

    @cached_property
    def verdict(self) -> Verdict:
        """Limits that the job exceeds."""
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
        """Problem of engines whose KV cache is too small for the longest sequence, with the fix; or None."""
        if self.engines.fits:
            return None
        if not self.engines.count:
            return "there are fewer --engine-gpus than rollout.sglang.tensor"
        fix = "rollout.sglang.tensor or memory_fraction" if self.job.colocated else "rollout.sglang.tensor"
        return (
            f"an engine's KV cache holds no sequence of {self.job.run.longest_sequence} tokens: raise {fix}"
        )


def make_plan(job: Job) -> JobPlan:
    """The plan of ``job``. Arithmetic only: no GPU, no weights, no processes."""
    return JobPlan(
        job=job,
        stages=[stage_memory(job, stage) for stage in range(job.parallel.pipeline)],
        speed=speed(job),
        traffic=update_traffic(job),
        sync=sync_traffic(job),
        engines=engines(job),
        host=host_bytes(job),
        host_update=host_update(job),
        handover=handover_estimate(job),
    )
