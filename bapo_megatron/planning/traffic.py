"""Communication estimate of ``bapo plan``: an update's collectives, and the weight sync to the engines.

``update_traffic`` and ``sync_traffic`` return bytes and seconds. A collective over n ranks on a tensor of M
bytes (global size) sends (n - 1) / n M from each rank for an all-gather or a reduce-scatter, and twice that
for an all-reduce (ring algorithms).

A broadcast sync spends little time on the wire: weights are gathered by parameter, copied into buckets,
announced to every server and loaded there (in verl's 72B sync, buckets take 23.5 of 24 s). So a sync also has
an expected time, at a measured rate for broadcast and an assumed one for disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bapo_megatron.algo.registered_losses import measures_ratio, searches_update
from bapo_megatron.planning.job import GB, GPUS_PER_NODE, Job
from bapo_megatron.planning.memory import optimizer_shard
from bapo_megatron.planning.sizes import stage_parameters, total_parameters
from bapo_megatron.policy.layout import stage_kinds

DISK_RATE = 2 * GB
"""Assumed file system rate of a node, reading or writing, bytes/s."""
BROADCAST_RATE = 65.5 * GB / 14.2
"""Measured weight rate by NCCL broadcast: verl, a dense 32B on H100 nodes in 14.2 s (verl issue 7060)."""
IPC_RATE = 53 * GB / 2.5
"""Measured weight rate by CUDA IPC on the same GPUs: miles, Qwen3.8-27B on eight H200 in 2.5 s (miles,
docs/models/qwen/qwen3-8.md)."""


@dataclass(frozen=True)
class Traffic:
    """One kind of communication in an update (TP, DP, ...): the busiest GPU's bytes, seconds, the link."""

    name: str
    sent: float
    """Bytes sent by the busiest GPU in an update."""
    seconds: float
    """Seconds at the link's stated rate; overlap with computation is not modelled."""
    link: str


def update_traffic(job: Job) -> list[Traffic]:
    """Return an update's communication by kind of parallelism, where any: TP, CP, EP, ETP, PP, DP."""
    p, own = job.parallel, stage_parameters(job.shape, job.parallel, 0)
    reach = {"TP": p.tensor, "CP": p.tensor * p.context}
    reach["DP"] = reach["CP"] * job.replicas
    reach["PP"] = reach["DP"] * p.pipeline
    reach |= {"ETP": p.expert_tensor, "EP": p.expert_tensor * p.expert}
    # Hidden states to the next stage and gradients back, for each model chunk.
    messages = p.virtual * (2 + forward_passes(job)) * (p.pipeline > 1)
    pipeline = job.tokens * job.filled_packs * job.place().input * messages
    # Float32 gradients reduce-scattered and weights all-gathered over DP x CP, experts' over ranks with them.
    data = (own.total - optimizer_shard(job, own)) * (4 + job.element)
    volumes = {**_layers(job), "PP": pipeline, "DP": data}
    return [_on_link(job, name, sent, reach[name]) for name, sent in volumes.items() if sent]


def forward_passes(job: Job) -> float:
    """Return the forward-only passes of an update, fractional where several updates share one.

    A loss that needs a statistic of the whole update (clipping bounds, response ratios) takes one, unless the
    statistic is fixed or ``batch.hold_forwards`` keeps the training forward passes; a loss by dotted path
    counts one. pi_old with ``old_log_probs`` "trainer" and a frozen reference take one each per step, shared
    by the ``reuse_epochs``; the off-policy sequence mask takes its own. The first update of a step may need
    fewer (``known_passes``).
    """
    algorithm = job.run.algorithm
    passes = 1.0 if searches_update(algorithm) and not job.run.batch.hold_forwards else 0.0
    passes += 0.0 if algorithm.corrections.off_policy_delta is None else 1.0
    of_step = (algorithm.old_log_probs == "trainer") + algorithm.reference_kl.enabled
    return passes + of_step / algorithm.reuse_epochs


def known_passes(job: Job) -> int:
    """Return how many ``forward_passes`` a step's first update skips (``trainer/update_loss.py``). Its ratios
    are known to be 1 if the policy's weights are pi_old: with ``old_log_probs`` "trainer", or if they sampled
    all responses of the step."""
    algorithm = job.run.algorithm
    by_trainer = algorithm.old_log_probs == "trainer"
    if not algorithm.known_ratio or (job.partial_rollout and not by_trainer):
        return 0
    masked = algorithm.corrections.off_policy_delta is not None
    searched = searches_update(algorithm) and not job.run.batch.hold_forwards
    known = by_trainer or not measures_ratio(algorithm)
    return masked + (searched and known and not algorithm.polarity.enabled)


def _on_link(job: Job, name: str, sent: float, ranks: int) -> Traffic:
    """Return a group's traffic: on NVLink if its ``ranks`` are in one node, otherwise on the network.

    Megatron numbers ranks TP first, then CP, DP, PP, and for experts ETP, then EP; ``ranks`` counts the
    group's kind and those before it, so groups of 6 span two nodes. Rings are as slow as their slowest link;
    of EP's all-to-all only the part to other nodes uses the network.
    """
    inside = job.gpus <= GPUS_PER_NODE or (ranks <= GPUS_PER_NODE and GPUS_PER_NODE % ranks == 0)
    rate = job.gpu.nvlink if inside else job.gpu.network
    seconds = sent / rate
    if name == "EP" and not inside:
        size = job.parallel.expert
        # a group of 6 has two ranks alone on a node, one of 16 has eight
        beside = math.gcd(size, max(1, GPUS_PER_NODE // job.parallel.expert_tensor)) - 1
        near = sent * beside / (size - 1)
        seconds = max(near / job.gpu.nvlink, (sent - near) / rate)
    return Traffic(name, sent, seconds, "NVLink" if inside else "network")


def _layers(job: Job) -> dict[str, float]:
    """Return the bytes that the busiest stage's layers send by kind of parallelism; TP includes the output
    layer's input and gradient."""
    at, size = job.place(passes=forward_passes(job)), job.parallel.tensor
    totals = {"TP": 0.0, "CP": 0.0, "EP": 0.0, "ETP": 0.0}
    for kinds in stage_kinds(job.parallel, job.shape):
        sent = [(count, kind.sent(at)) for kind, count in kinds.items()]
        own = {name: sum(count * by.get(name, 0.0) for count, by in sent) for name in totals}
        totals = {name: max(totals[name], own[name]) for name in totals}
    totals["TP"] += 2 * at.hidden * at.element * (size - 1) / size
    return {name: job.tokens * job.filled_packs * sent for name, sent in totals.items()}


@dataclass(frozen=True)
class Sync(Traffic):
    """Traffic of a step's weight sync to the engines, with the expected seconds of the whole sync."""

    expected_seconds: float
    """Seconds of a sync at the measured or assumed rate."""
    basis: str
    """Source of the expected time."""


def sync_traffic(job: Job) -> Sync:
    """Return a step's weight sync: the whole model leaves one trainer GPU by its network port, or, with
    ``sync=ipc``, in the hand-over; nothing for a replay. A transport of another name counts as disk."""
    if not job.samples:
        return Sync("sync", 0.0, 0.0, "none", 0.0, "no engines")
    sent = float(total_parameters(job.shape) * job.element)
    if job.weights_by_ipc:
        return Sync("sync", sent, 0.0, "GPU memory", 0.0, "see turns")
    wire, way = sent / job.gpu.network, job.run.rollout.engine_config.sync
    if way == "broadcast":
        return Sync("sync", sent, wire, "network", max(wire, sent / BROADCAST_RATE), "measured with verl")
    # All nodes write in parallel; each server node reads everything, colocated ones during the hand-over.
    writing = sent / DISK_RATE / -(-job.gpus // GPUS_PER_NODE)
    reading = 0.0 if job.colocated else sent / DISK_RATE
    return Sync(
        "sync", sent, wire, "network", writing + reading, f"at {DISK_RATE / GB:.0f} GB/s a node, assumed"
    )
