"""Training speed estimate of ``bapo plan``: FLOPs, duration and MFU of an update.

A GPU is taken to compute matrices at ``mfu`` x its dense bf16 peak, and attention at ``attention_mfu`` x. The
costs of the layout come on top: recomputation, and the pipeline bubble. Communication is listed apart and not
added: a measured ``mfu`` already contains the exposed part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapo_megatron.commands.plan.job import Job, slots
from bapo_megatron.commands.plan.memory import offloaded_bytes
from bapo_megatron.commands.plan.sizes import stage_parameters, total_parameters
from bapo_megatron.commands.plan.sync import DISK_RATE, IPC_RATE
from bapo_megatron.commands.plan.traffic import forward_passes, update_traffic
from bapo_megatron.policy.flops import (
    attention_flops,
    head_flops_per_token,
    linear_flops_per_token,
    mlp_matmuls,
)

_STEP_BYTES = 40
"""Host memory traffic of an element in a step on the host. AdamW reads gradient, master weight and two
moments and writes the last three, 28; rounding the new weight reads 4 and writes 2; the copies over PCIe
write the gradient and read the weight, 6."""
_LINK_EFFICIENCY = 0.5
"""Assumed share of the data sheets' rates that is reached."""


@dataclass(frozen=True)
class Speed:
    """FLOPs, duration and throughput of one update."""

    flops_per_token: float
    """Model FLOPs of a training pass (3 forward passes), for a token in a sequence of typical length."""
    flops_per_token_longest: float
    """Model FLOPs of a training pass, for a token in a sequence of the longest length."""
    executed_per_token: float
    """FLOPs executed: the model's, recomputation, flash attention's scores again in its backward pass, and
    the forward-only passes for bounds and pi_old."""
    micro_batches: int
    idle: float
    """Share of the time that GPUs idle: the pipeline bubble and unequal stages."""
    update_seconds: float
    """Seconds of the training pass and of the forward-only passes."""
    forward_seconds: float
    """Seconds of the forward-only passes, contained in ``update_seconds``."""
    link_seconds: float
    """Seconds of communication at the links' stated rates, none of it hidden; not part of update_seconds."""
    tokens_per_second: float
    """Tokens per second and GPU over the whole update."""
    model_utilization: float
    """Model FLOPs of the training pass over peak x time: what a log of the run would show as MFU."""


def speed(job: Job) -> Speed:
    """The estimated speed of an update whose packs are full."""
    forward = forward_flops(job, job.typical_length)
    train, before = _seconds(job, training=True), forward_passes(job) * _seconds(job, training=False)
    tokens = job.micro_batches * job.run.batch.pack_tokens * job.replicas
    rate = tokens / (train + before) / job.gpus
    work = _training(job)
    executed = work.matrices + work.attention + work.head + forward_passes(job) * forward
    busy = (work.seconds(job) + forward_passes(job) * _forward(job).seconds(job)) * tokens / job.gpus
    return Speed(
        flops_per_token=3 * forward,
        flops_per_token_longest=3 * forward_flops(job, job.run.longest_sequence),
        executed_per_token=executed,
        micro_batches=job.micro_batches,
        idle=max(0.0, 1 - busy / (train + before)),
        update_seconds=train + before,
        forward_seconds=before,
        link_seconds=sum(part.seconds for part in update_traffic(job)),
        tokens_per_second=rate,
        model_utilization=rate * 3 * forward / job.gpu.peak,
    )


def forward_flops(job: Job, length: float) -> float:
    """FLOPs of a forward pass for each token of a sequence of ``length`` tokens."""
    return linear_flops_per_token(job.shape) + attention_flops(job.shape, length) / length


@dataclass(frozen=True)
class _Work:
    """FLOPs of a pass for each token, by the rate at which a GPU computes them."""

    matrices: float
    """Matrices of the layers."""
    attention: float
    """Scores and weighted values."""
    head: float
    """The output layer."""

    def seconds(self, job: Job, stages: int = 1) -> float:
        """Seconds of one GPU for the last of ``stages`` pipeline stages, which has the output layer."""
        matrices = (self.matrices / stages + self.head) / job.options.mfu
        return (matrices + self.attention / stages / job.options.attention_mfu) / job.gpu.peak


def _forward(job: Job) -> _Work:
    head = head_flops_per_token(job.shape)
    attention = attention_flops(job.shape, job.typical_length) / job.typical_length
    return _Work(linear_flops_per_token(job.shape) - head, attention, head)


def _training(job: Job) -> _Work:
    """Forward and backward, and what runs again between them: recomputed layers ("selective" is attention and
    the MLP), and the output layer if bounds are searched between its logits and its gradient.

    Flash attention's backward pass makes five products where the forward pass makes two (FlashAttention-2,
    arXiv 2307.08691, section 3.1), so half a forward pass more than the four of one that has the scores.
    """
    forward, mode = _forward(job), job.run.batch.recompute
    mlp = 2 * job.shape.layers * mlp_matmuls(job.shape)
    matrices = {"none": 0.0, "selective": mlp, "full": forward.matrices}[mode]
    return _Work(
        matrices=3 * forward.matrices + matrices,
        attention=forward.attention * (3.5 + (mode != "none")),
        head=forward.head * (3 + _output_layer_twice(job)),
    )


def _output_layer_twice(job: Job) -> bool:
    """Whether the output layer's forward pass runs twice: once to search the bounds, once for the loss."""
    return job.run.batch.hold_forwards or job.run.algorithm.bounds.sums_over == "micro_batch"


def _seconds(job: Job, training: bool) -> float:
    """Seconds of one pass over all micro-batches of an update, forward and backward if ``training``.

    The last stage is the slowest, since it also has the output layer, and sets the pace of the pipeline.
    """
    work = _training(job) if training else _forward(job)
    ranks = job.parallel.tensor * job.parallel.context
    pack = work.seconds(job, job.parallel.pipeline) * job.run.batch.pack_tokens / ranks
    return pack * slots(job.parallel, job.micro_batches)


@dataclass(frozen=True)
class HostUpdate:
    """Seconds of an optimizer step on the host (``optimizer.device=cpu``), of the slowest stage.

    The copies run beside the cores, bucket by bucket, so the slower takes the time. Left out: the first and
    the last bucket's copies, and the pages that are copied in the first step after a checkpoint has begun.
    """

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
    elements, pcie = largest / job.optimizer_shards, _LINK_EFFICIENCY * job.gpu.pcie
    memory = _LINK_EFFICIENCY * job.gpu.host_bandwidth
    return HostUpdate(
        elements=elements,
        step_seconds=_STEP_BYTES * elements * job.gpus_on_node / memory,
        fetch_seconds=4 * elements / pcie,
        send_seconds=job.element * elements / pcie,
    )


@dataclass(frozen=True)
class Handover:
    """Seconds of a step in which colocated servers and the policy change places, and nobody works.

    Left out: what servers take to give up their memory and to get it back, a second or so.
    """

    moved: float
    """Bytes that a GPU copies to the host and later back."""
    moving_seconds: float
    """Both ways, all GPUs of a node at once."""
    read: float
    """Bytes of the weights that servers load."""
    by_handles: bool
    """They load them from the policy's memory, not from the disk."""
    reading_seconds: float
    """From the disk one reading: the other servers of the node find the bytes in its memory. Else the copies
    within a GPU's memory alone."""
    expected_reading_seconds: float
    """From the policy's memory at the rate that was measured elsewhere (``sync.IPC_RATE``)."""

    @property
    def seconds(self) -> float:
        """All of a step."""
        return self.moving_seconds + self.expected_reading_seconds


def handover_estimate(job: Job) -> Handover | None:
    """The changes of a step of the job; None without colocated servers."""
    if not job.colocated:
        return None
    moved, read = offloaded_bytes(job), 2.0 * total_parameters(job.shape)
    rate = _LINK_EFFICIENCY * min(job.gpu.pcie, job.gpu.host_bandwidth / job.gpus_on_node)
    seconds = read * _copies_in_memory(job) if job.weights_by_ipc else read / DISK_RATE
    expected = max(seconds, read / IPC_RATE) if job.weights_by_ipc else seconds
    return Handover(moved, 2 * moved / rate, read, job.weights_by_ipc, seconds, expected)


def _copies_in_memory(job: Job) -> float:
    """Seconds for a byte of weights through GPU memory: gathered over NVLink, copied into a bucket, and from
    there into the server's weights; each copy reads and writes it."""
    return 1 / job.gpu.nvlink + 4 / (_LINK_EFFICIENCY * job.gpu.memory_bandwidth)
