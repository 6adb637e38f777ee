"""Training speed estimate of ``bapo plan``: FLOPs, duration and MFU of an update; GPU hand-over time.

``speed`` estimates an update, ``host_update_seconds`` a host optimizer step, ``handover_estimate`` the GPU
hand-overs between the policy and colocated engines. A GPU computes matrix products at ``mfu``
times its dense bf16 peak, attention at ``attention_mfu`` times. Recomputation and the pipeline bubble are
added; communication is listed separately, because a measured ``mfu`` already contains its exposed part.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bapo_megatron.hf.config import attention_flops, head_flops_per_token, linear_flops_per_token
from bapo_megatron.layers import Kind
from bapo_megatron.planning.job import Job, slots
from bapo_megatron.planning.memory import largest_shard, largest_stage_weights, offloaded_bytes
from bapo_megatron.planning.sizes import total_parameters
from bapo_megatron.planning.traffic import DISK_RATE, IPC_RATE, forward_passes, known_passes, update_traffic
from bapo_megatron.policy.layout import stage_kinds

_STEP_BYTES = 40
"""Host memory traffic per element of a host optimizer step, bytes: AdamW reads gradient, master weight and
two moments and writes the last three, 28; rounding the new weight reads 4 and writes 2; the copies over PCIe
write the gradient and read the weight, 6."""
_LINK_EFFICIENCY = 0.5
"""Assumed efficiency of PCIe and memory relative to data sheets."""


@dataclass(frozen=True)
class Speed:
    """Estimate of one update: FLOPs per token, seconds of its passes, idle share, tokens per second, MFU."""

    flops_per_token: float
    """Model FLOPs per token of a training pass (3 forward passes) in a sequence of typical length."""
    flops_per_token_longest: float
    """The same in a sequence of the longest length."""
    executed_per_token: float
    """FLOPs executed per token: the model's, recomputation, flash attention's scores again in its backward
    pass, and the forward-only passes for bounds and pi_old."""
    micro_batches: int
    idle: float
    """Share of GPU time idle: pipeline bubble, unequal stages and experts, and replicas without a full pack.
    """
    update_seconds: float
    """Seconds of the training pass and the forward-only passes."""
    forward_seconds: float
    """Seconds of the forward-only passes, included in ``update_seconds``."""
    known_seconds: float
    """Seconds of the forward-only passes that a step's first update skips."""
    link_seconds: float
    """Seconds of communication at the links' stated rates, none of it hidden; not in update_seconds."""
    tokens_per_second: float
    """Update tokens per second and GPU, without padding of packs."""
    model_utilization: float
    """Model FLOPs of the training pass over peak x time: the MFU that the run would log."""


def speed(job: Job) -> Speed:
    """Return the estimated speed of an update, whose packs are full if there is at least one per replica."""
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
    """Return forward FLOPs per token of a sequence of ``length`` tokens."""
    return linear_flops_per_token(job.shape) + attention_flops(job.shape, length) / length


@dataclass(frozen=True)
class _Work:
    """FLOPs of a pass per token, by kind of kernel (and so by MFU)."""

    matrices: float
    """Layer matrices without experts."""
    experts: float
    """Matrices of routers and experts on the mean rank; the busiest takes longer."""
    attention: float
    """Attention scores and weighted values."""
    head: float
    """The output layer."""

    @property
    def flops(self) -> float:
        return self.matrices + self.experts + self.attention + self.head

    def seconds(self, job: Job, imbalance: float = 1.0) -> float:
        """Return seconds of one GPU. ``imbalance``: token copies that its experts process, over the mean."""
        matrices = (self.matrices + self.experts * imbalance + self.head) / job.options.mfu
        return (matrices + self.attention / job.options.attention_mfu) / job.gpu.peak


def _forward(job: Job, kinds: Counter[Kind], head: bool = True) -> _Work:
    """Return the forward work of some layers, plus the output layer with ``head``."""
    flops = [(count, kind.flops(job.shape.hidden)) for kind, count in kinds.items()]
    return _Work(
        matrices=sum(count * own.linear for count, own in flops),
        experts=sum(count * own.routed for count, own in flops),
        attention=sum(count * own.quadratic for count, own in flops) * job.typical_length,
        head=head_flops_per_token(job.shape) * head,
    )


def _training(job: Job, kinds: Counter[Kind], head: bool = True) -> _Work:
    """Return training work: forward, backward, recomputation ("selective": of the MLP), and a second forward
    pass of the output layer if the bounds are searched before its gradient.

    Flash attention's backward pass makes five products where the forward pass makes two (FlashAttention-2,
    arXiv 2307.08691, section 3.1): half a forward pass more than the four with stored scores.
    """
    forward, mode = _forward(job, kinds, head), job.run.batch.recompute
    mlp = sum(count * kind.flops(job.shape.hidden).selective for kind, count in kinds.items())
    matrices = {"none": 0.0, "selective": mlp, "full": forward.matrices}[mode]
    twice = job.holds_forwards or job.run.algorithm.bounds.sums_over == "micro_batch"
    return _Work(
        matrices=3 * forward.matrices + matrices,
        experts=forward.experts * (3 + (mode != "none")),
        attention=forward.attention * (3.5 + (mode == "full")),
        head=forward.head * (3 + twice),
    )


def _seconds(job: Job, training: bool) -> float:
    """Return seconds of one pass over an update's micro-batches, forward and backward if ``training``. The
    slowest stage sets the pipeline's pace."""
    work, stages = (_training if training else _forward), stage_kinds(job.parallel, job.shape)
    busiest, last = job.expert_imbalance, len(stages) - 1
    slowest = max(work(job, own, stage == last).seconds(job, busiest) for stage, own in enumerate(stages))
    pack = slowest * job.run.batch.pack_tokens / (job.parallel.tensor * job.parallel.context)
    return pack * slots(job.parallel, job.filled_packs)


def host_update_seconds(job: Job) -> float:
    """Return seconds of a host optimizer step (``optimizer.device=cpu``) on the slowest stage; 0 on the GPU,
    where it is negligible. The longest of AdamW with rounding (all ranks of a node in parallel), gradients to
    the host and weights to the GPU, since buckets overlap them. Not counted: the first and last bucket, and
    copy-on-write pages of the first step after a checkpoint starts."""
    if not job.host_optimizer:
        return 0.0
    elements, pcie = largest_shard(job), _LINK_EFFICIENCY * job.gpu.pcie
    stepping = _STEP_BYTES * elements * job.gpus_on_node / (_LINK_EFFICIENCY * job.gpu.host_bandwidth)
    return max(stepping, 4 * elements / pcie, job.element * elements / pcie)


@dataclass(frozen=True)
class Handover:
    """Estimate of a step's GPU hand-overs between the policy and colocated servers, in which no GPU computes:
    bytes and seconds of moving the policy and of loading weights. Not counted: the servers' own release and
    resume of memory, about a second."""

    moved: float
    """Bytes offloaded to the host and reloaded, per GPU."""
    moving_seconds: float
    """Seconds of offload and reload, all GPUs of a node in parallel."""
    read: float
    """Bytes of weights that servers load."""
    by_handles: bool
    """Whether servers load weights from the policy's memory by IPC handles, not from disk."""
    reading_seconds: float
    """From disk: one read, then the node's page cache serves. By IPC: the copies within GPU memory."""
    expected_reading_seconds: float
    """By IPC at a rate measured elsewhere (``traffic.IPC_RATE``); from disk as above."""

    @property
    def seconds(self) -> float:
        return self.moving_seconds + self.expected_reading_seconds


def handover_estimate(job: Job) -> Handover | None:
    """Return a step's GPU hand-overs; None without colocated servers."""
    if not job.colocated:
        return None
    offloaded, read = offloaded_bytes(job), 2.0 * total_parameters(job.shape)
    # Gathered, copied into a bucket, then into the server's weights; each copy reads and writes.
    in_memory = 1 / job.gpu.nvlink + 4 / (_LINK_EFFICIENCY * job.gpu.memory_bandwidth)
    seconds = read * in_memory if job.weights_by_ipc else read / DISK_RATE
    expected = max(seconds, read / IPC_RATE) if job.weights_by_ipc else seconds
    return Handover(offloaded, 2 * offloaded / _host_rate(job), read, job.weights_by_ipc, seconds, expected)


def reference_seconds(job: Job) -> float:
    """Return seconds of a step to swap the frozen reference and the policy over PCIe; 0 without a reference.
    Both ways: four times the largest stage's weights, all GPUs of a node in parallel. Without the forward
    pass in between, which ``traffic.forward_passes`` counts."""
    if not job.run.algorithm.reference_kl.enabled:
        return 0.0
    return 4 * largest_stage_weights(job) / _host_rate(job)


def _host_rate(job: Job) -> float:
    return _LINK_EFFICIENCY * min(job.gpu.pcie, job.gpu.host_bandwidth / job.gpus_on_node)
