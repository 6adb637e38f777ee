"""Duration of an optimizer step on the host (``optimizer.device=cpu``): AdamW, and copies over PCIe.

An element costs 28 bytes of host memory traffic: gradient, master weight and two moments are read, the last
three are written. Copies of gradients and weights run beside it, bucket by bucket, so the slowest of the
three takes the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapo_megatron.commands.plan.job import Job
from bapo_megatron.commands.plan.sizes import stage_parameters

_STEP_BYTES = 28
_REACHED = 0.5
"""Assumed share of the data sheets' rates that is reached."""


@dataclass(frozen=True)
class HostUpdate:
    """Seconds of an optimizer step on the host, of the slowest stage."""

    elements: float
    """Elements of a rank's share."""
    step_seconds: float
    """AdamW, with all ranks of a node at once."""
    fetch_seconds: float
    """Gradients to the host."""
    send_seconds: float
    """Weights to the GPU."""

    @property
    def seconds(self) -> float:
        """Duration of the whole step."""
        return max(self.step_seconds, self.fetch_seconds, self.send_seconds)


def host_update(job: Job) -> HostUpdate | None:
    """The step of the job's optimizer; None if it is on the GPU."""
    if not job.host_optimizer:
        return None
    stages = range(job.parallel.pipeline)
    largest = max(stage_parameters(job.shape, job.parallel, stage).total for stage in stages)
    elements, pcie = largest / job.optimizer_shards, _REACHED * job.gpu.pcie
    memory = _REACHED * job.gpu.host_bandwidth
    return HostUpdate(
        elements=elements,
        step_seconds=_STEP_BYTES * elements * job.gpus_on_node / memory,
        fetch_seconds=4 * elements / pcie,
        send_seconds=job.element * elements / pcie,
    )
