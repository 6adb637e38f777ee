"""Duration of an optimizer step on the host (``optimizer.device=cpu``): AdamW, and copies over PCIe.

An element costs 40 bytes of host memory traffic. AdamW reads gradient, master weight and two moments and
writes the last three, 28; rounding the new weight reads 4 and writes 2; the copies over PCIe write the
gradient and read the weight, 6. The copies run beside the cores, bucket by bucket, so the slower takes the
time. Left out: the first and the last bucket's copies, and the pages that are copied in the first step after
a checkpoint has begun.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapo_megatron.commands.plan.job import Job
from bapo_megatron.commands.plan.sizes import stage_parameters

_STEP_BYTES = 40
_REACHED = 0.5
"""Assumed share of the data sheets' rates that is reached."""


@dataclass(frozen=True)
class HostUpdate:
    """Seconds of an optimizer step on the host, of the slowest stage."""

    elements: float
    """Elements of a rank's share."""
    step_seconds: float
    """AdamW and rounding, with all ranks of a node at once."""
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
