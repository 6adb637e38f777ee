"""Weight sync estimate of ``bapo plan``: time on the wire, and time at rates that were measured elsewhere.

The wire is the smaller part. Weights are gathered parameter by parameter, copied into buckets, announced to
every server and loaded there. In verl's 72B sync the sender spends 23.5 of its 24 s on buckets. Used by
``plan.py``, ``speed.py`` and ``table.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapo_megatron.commands.plan.hardware import GB, GPUS_PER_NODE
from bapo_megatron.commands.plan.job import Job
from bapo_megatron.commands.plan.sizes import total_parameters
from bapo_megatron.commands.plan.traffic import Traffic

DISK_RATE = 2 * GB
"""Assumed rate at which a node writes or reads its file system, in bytes a second."""
BROADCAST_RATE = 65.5 * GB / 14.2
"""Measured rate of weights by NCCL broadcast: verl, a dense 32B on H100 nodes in 14.2 s (verl issue 7060)."""
IPC_RATE = 53 * GB / 2.5
"""Measured rate of weights from the trainer's memory on the same GPUs, CUDA IPC: miles, Qwen3.8-27B on eight
H200 in 2.5 s (miles, docs/models/qwen/qwen3-8.md)."""


@dataclass(frozen=True)
class Sync(Traffic):
    """Weight sync of a step to the engines; ``seconds`` is the time on the wire alone."""

    expected_seconds: float
    """Seconds of a sync at the measured or assumed rate."""
    basis: str
    """Source of the expected time."""


def sync_traffic(job: Job) -> Sync:
    """The weight sync of a step: the whole model leaves one trainer GPU by its network port. With
    ``sync=ipc`` it is part of the GPU hand-over."""
    sent = float(total_parameters(job.shape) * job.element)
    if job.weights_by_ipc:
        return Sync("sync", sent, 0.0, "GPU memory", 0.0, "see turns")
    wire, way = sent / job.gpu.network, job.run.rollout.engine_config.sync
    if way == "broadcast":
        return Sync("sync", sent, wire, "network", max(wire, sent / BROADCAST_RATE), "measured with verl")
    # All nodes write at the same time; each node of servers reads everything, colocated ones in their turn.
    writing = sent / DISK_RATE / -(-job.gpus // GPUS_PER_NODE)
    reading = 0.0 if job.colocated else sent / DISK_RATE
    return Sync(
        "sync", sent, wire, "network", writing + reading, f"at {DISK_RATE / GB:.0f} GB/s a node, assumed"
    )
