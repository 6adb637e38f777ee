"""Training speed estimate of ``bapo plan``: FLOPs, duration and MFU of an update; GPU hand-over time.

A GPU is taken to compute matrices at ``mfu`` x its dense bf16 peak, and attention at ``attention_mfu`` x. The
costs of the layout come on top: recomputation, and the pipeline bubble. Communication is listed apart and not
added: a measured ``mfu`` already contains the exposed part of it. Hand-over: colocated engines and the policy
take turns on the same GPUs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bapo_megatron.hf.config import attention_flops, head_flops_per_token, linear_flops_per_token
from bapo_megatron.layers import Kind
from bapo_megatron.planning.job import Job, slots
from bapo_megatron.planning.memory import largest_shard, largest_stage_weights, offloaded_bytes
from bapo_megatron.planning.sizes import rank_imbalance, total_parameters
from bapo_megatron.planning.traffic import DISK_RATE, IPC_RATE, forward_passes, known_passes, update_traffic
from bapo_megatron.policy.layout import stage_kinds

_STEP_BYTES = 40
"""Host memory traffic of an element in a host optimizer step, bytes: AdamW reads gradient, master weight and
two moments and writes the last three, 28; rounding the new weight reads 4 and writes 2; the copies over PCIe
write the gradient and read the weight, 6."""
_LINK_EFFICIENCY = 0.5
"""Assumed efficiency of PCIe and memory against the data sheets' rates."""


@dataclass(frozen=True)
class Speed:
    """Estimated FLOPs, duration and throughput of one update."""

    flops_per_token: float
    """Model FLOPs of a training pass (3 forward passes), for a token in a sequence of typical length."""
    flops_per_token_longest: float
    """Model FLOPs of a training pass, for a token in a sequence of the longest length."""
    executed_per_token: float
    """FLOPs executed: the model's, recomputation, flash attention's scores again in its backward pass, and
    the forward-only passes for bounds and pi_old."""
    micro_batches: int
    idle: float
    """Share of the time that GPUs idle: the pipeline bubble, unequal stages and unequal experts, and replicas
    that an update has no full pack for."""
    update_seconds: float
    """Seconds of the training pass and of the forward-only passes."""
    forward_seconds: float
    """Seconds of the forward-only passes, contained in ``update_seconds``."""
    known_seconds: float
    """Seconds of the forward-only passes that the first update of a step does not need."""
    link_seconds: float
    """Seconds of communication at the links' stated rates, none of it hidden; not part of update_seconds."""
    tokens_per_second: float
    """Tokens of the update per second and GPU: empty places of packs do not count."""
    model_utilization: float
    """Model FLOPs of the training pass over peak x time: what a log of the run would show as MFU."""


def speed(job: Job) -> Speed:
    """Estimated speed of an update, of full packs where it has one for each replica."""
    forward = forward_flops(job, job.typical_length)
    train, once = _seconds(job, training=True), _seconds(job, training=False)
    before = forward_passes(job) * once
    tokens = job.tokens_per_update
    rate = tokens / (train + before) / job.gpus
    layers: Counter[Kind] = sum(stage_kinds(job.parallel, job.shape), Counter())
    work = _training(job, layers)
    executed = work.flops + forward_passes(job) * forward
    busy = (work.seconds(job) + forward_passes(job) * _forward(job, layers).seconds(job)) * tokens / job.gpus
    return Speed(
        flops_per_token=3 * forward,
        flops_per_token_longest=3 * forward_flops(job, job.run.longest_sequence),
        executed_per_token=executed,
        micro_batches=job.micro_batches,
        idle=max(0.0, 1 - busy / (train + before)),
        update_seconds=train + before,
        forward_seconds=before,
        known_seconds=known_passes(job) * once,
        link_seconds=sum(part.seconds for part in update_traffic(job)),
        tokens_per_second=rate,
        model_utilization=rate * 3 * forward / job.gpu.peak,
    )


def forward_flops(job: Job, length: float) -> float:
    """FLOPs of a forward pass for each token of a sequence of ``length`` tokens."""
    return linear_flops_per_token(job.shape) + attention_flops(job.shape, length) / length


@dataclass(frozen=True)
class _Work:
    """FLOPs of a pass for each token, by kind of kernel (and so by MFU)."""

    matrices: float
    """Matrices of the layers without experts."""
    experts: float
    """Matrices of routers and experts, of the mean rank: the busiest one takes longer."""
    attention: float
    """Scores and weighted values."""
    head: float
    """The output layer."""

    @property
    def flops(self) -> float:
        return self.matrices + self.experts + self.attention + self.head

    def seconds(self, job: Job, imbalance: float = 1.0) -> float:
        """Seconds of one GPU. ``imbalance``: copies of tokens that its experts process, over the mean."""
        matrices = (self.matrices + self.experts * imbalance + self.head) / job.options.mfu
        return (matrices + self.attention / job.options.attention_mfu) / job.gpu.peak


def _forward(job: Job, kinds: Counter[Kind], head: bool = True) -> _Work:
    """The work of a forward pass of some layers, and of the output layer with ``head``."""
    flops = [(count, kind.flops(job.shape.hidden)) for kind, count in kinds.items()]
    return _Work(
        matrices=sum(count * own.linear for count, own in flops),
        experts=sum(count * own.routed for count, own in flops),
        attention=sum(count * own.quadratic for count, own in flops) * job.typical_length,
        head=head_flops_per_token(job.shape) * head,
    )


def _training(job: Job, kinds: Counter[Kind], head: bool = True) -> _Work:
    """Training FLOPs: forward, backward and recomputation ("selective": of the MLP), and a second forward
    pass of the output layer if the bounds are searched before its gradient.

    Flash attention's backward pass makes five products where the forward pass makes two (FlashAttention-2,
    arXiv 2307.08691, section 3.1), so half a forward pass more than the four of one that has the scores.
    """
    forward, mode = _forward(job, kinds, head), job.run.batch.recompute
    mlp = sum(count * kind.flops(job.shape.hidden).selective for kind, count in kinds.items())
    matrices = {"none": 0.0, "selective": mlp, "full": forward.matrices}[mode]
    twice = job.run.batch.hold_forwards or job.run.algorithm.bounds.sums_over == "micro_batch"
    return _Work(
        matrices=3 * forward.matrices + matrices,
        experts=forward.experts * (3 + (mode != "none")),
        attention=forward.attention * (3.5 + (mode == "full")),
        head=forward.head * (3 + twice),
    )


def _seconds(job: Job, training: bool) -> float:
    """Seconds of one pass over all micro-batches of an update, forward and backward if ``training``.

    The slowest stage sets the pace of the pipeline.
    """
    work, stages = (_training if training else _forward), stage_kinds(job.parallel, job.shape)
    busiest = rank_imbalance(job.parallel, job.expert_imbalance)
    last = len(stages) - 1
    slowest = max(work(job, own, stage == last).seconds(job, busiest) for stage, own in enumerate(stages))
    pack = slowest * job.run.batch.pack_tokens / (job.parallel.tensor * job.parallel.context)
    return pack * slots(job.parallel, job.filled_packs)


@dataclass(frozen=True)
class HostUpdate:
    """Seconds of a host optimizer step (``optimizer.device=cpu``), on the slowest stage: max(AdamW, copies).

    Copies run beside the cores, by buckets. Left out: those of the first and last, and the copy-on-write
    pages of the first step after a checkpoint has begun.
    """

    elements: float
    """Elements of a rank's optimizer shard."""
    step_seconds: float
    """AdamW and rounding, with all ranks of a node at once."""
    fetch_seconds: float
    """Gradients to the host."""
    send_seconds: float
    """Weights to the GPU."""

    @property
    def seconds(self) -> float:
        return max(self.step_seconds, self.fetch_seconds, self.send_seconds)


def host_update(job: Job) -> HostUpdate | None:
    """The host optimizer step of the job; None if its optimizer is on the GPU."""
    if not job.host_optimizer:
        return None
    elements, pcie = largest_shard(job), _LINK_EFFICIENCY * job.gpu.pcie
    memory = _LINK_EFFICIENCY * job.gpu.host_bandwidth
    return HostUpdate(
        elements=elements,
        step_seconds=_STEP_BYTES * elements * job.gpus_on_node / memory,
        fetch_seconds=4 * elements / pcie,
        send_seconds=job.element * elements / pcie,
    )


@dataclass(frozen=True)
class Handover:
    """GPU hand-over of a step between the policy and colocated servers: seconds in which no GPU computes.

    Left out: the servers' own release and resume of memory, about a second.
    """

    moved: float
    """Bytes that a GPU offloads to the host and reloads."""
    moving_seconds: float
    """Seconds of offload and reload, all GPUs of a node at once."""
    read: float
    """Bytes of the weights that servers load."""
    by_handles: bool
    """Whether servers load the weights from the policy's memory by IPC handles, not from disk."""
    reading_seconds: float
    """From disk: one read, since the node's other servers find the bytes in the page cache. By IPC: the
    copies within GPU memory alone."""
    expected_reading_seconds: float
    """By IPC at the rate that was measured elsewhere (``traffic.IPC_RATE``); from disk the same as above."""

    @property
    def seconds(self) -> float:
        return self.moving_seconds + self.expected_reading_seconds


def handover_estimate(job: Job) -> Handover | None:
    """The GPU hand-overs of a step; None without colocated servers."""
    if not job.colocated:
        return None
    offloaded, read = offloaded_bytes(job), 2.0 * total_parameters(job.shape)
    seconds = read * _copies_in_memory(job) if job.weights_by_ipc else read / DISK_RATE
    expected = max(seconds, read / IPC_RATE) if job.weights_by_ipc else seconds
    return Handover(offloaded, 2 * offloaded / _host_rate(job), read, job.weights_by_ipc, seconds, expected)


def reference_seconds(job: Job) -> float:
    """Seconds of a step in which the frozen reference and the policy swap places over PCIe; 0 without one.

    There and back: four times the weights of the largest stage, on all GPUs of a node at once. The forward
    pass between is in ``traffic.forward_passes``.
    """
    if not job.run.algorithm.reference_kl.enabled:
        return 0.0
    return 4 * largest_stage_weights(job) / _host_rate(job)


def _host_rate(job: Job) -> float:
    """Rate of a GPU's copies to or from the host, all GPUs of a node at once."""
    return _LINK_EFFICIENCY * min(job.gpu.pcie, job.gpu.host_bandwidth / job.gpus_on_node)


def _copies_in_memory(job: Job) -> float:
    """Seconds per byte of an IPC weight load, 1 / NVLink + 4 / GPU memory: gathered, copied into a bucket,
    and copied into the server's weights; each copy reads and writes."""
    return 1 / job.gpu.nvlink + 4 / (_LINK_EFFICIENCY * job.gpu.memory_bandwidth)
