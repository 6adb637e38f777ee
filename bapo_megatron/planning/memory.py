"""Memory estimate of ``bapo plan`` in bytes: one GPU of each pipeline stage, and a node's host.

``stage_memory`` returns the former, ``host_bytes`` the latter. Weights, gradients, optimizer states and
activations are counted tensor by tensor; fields that are only estimates say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapo_megatron.layers import Block
from bapo_megatron.layers.costs import Place, Spec
from bapo_megatron.planning.job import GB, Job, in_flight
from bapo_megatron.planning.sizes import (
    StageParameters,
    largest_parameter,
    stage_parameters,
    total_parameters,
)
from bapo_megatron.policy.layout import chunk_blocks
from bapo_megatron.step_header import RouteShape

_FP32 = 4
# Estimate: CUDA context and kernels 1 GB, cuBLAS and Transformer Engine workspaces 0.5 GB, NCCL channel
# buffers of some six process groups 1.5 GB.
FIXED = 3 * GB
# Estimate: fragmentation in the caching allocator.
FRAGMENTATION = 0.05
_SOFTMAX_LOGITS = 1 << 27  # policy/output_head.py
_BUCKET = 1 << 26  # policy/optimizer.py
_HOST_BLOCK = 1 << 28  # policy/offload.py
PACK_COLUMNS = 4 * 8 + 7 * 4 + 2 * 4
"""Bytes of a token's columns on the device (``tensor_types.COLUMNS``): four int64, seven float32, two int32.
Every run has columns for a reference's and a teacher's log-probs."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one GPU of a pipeline stage, in bytes: each use (weights, gradients, optimizer, activations,
    ...), and the peaks of an update, a save, a sync, sampling and a hand-over, each the sum of the uses at
    that time."""

    stage: int
    parameters: StageParameters
    in_flight: int
    """Micro-batches (model chunks if virtual) with live activations."""
    weights: float
    gradients: float
    """float32 buffer of all gradients."""
    optimizer: float
    """Rank's shard of master weights and Adam moments; 0 with ``optimizer.device=cpu``."""
    activations: float
    """Activations saved for backward passes in flight, plus one recomputed layer."""
    workspace: float
    """Estimated backward workspace: one layer's activation gradients and its gathered input."""
    head: float
    """Output layer: one chunk of logits, hidden states with gradient, gradient of the matrix."""
    buffers: float
    """Estimate: pipeline messages, context parallelism's ring, and the update's packs."""
    reserve: float
    """Estimate: CUDA context, NCCL buffers, and allocator fragmentation."""
    saving: float
    """Peak while gathering a checkpoint, without activations."""
    syncing: float
    """Peak while gathering weights for engines, one parameter at a time."""
    resting: float
    """Policy memory while engines sample; if offloaded, CUDA context and NCCL buffers."""
    kept: float
    """Memory never released by a colocated server: ``rollout.sglang.kept_gb``; 0 without one."""
    serving: float
    """Weights and KV cache of a colocated server while sampling; 0 without one."""
    handing: float
    """Policy memory during the weight hand-over to a colocated server (``sync=ipc``), else 0."""
    reading: float
    """Server weights during the hand-over, else 0."""

    @property
    def training(self) -> float:
        """Peak memory of an update; the output layer ends before a layer's backward pass begins."""
        passing = self.activations + max(self.workspace, self.head) + self.buffers
        return self.weights + self.gradients + self.optimizer + passing + self.reserve

    @property
    def policy_peak(self) -> float:
        """Largest of the policy's peaks: update, save, sync."""
        return max(self.training, self.saving, self.syncing)

    @property
    def sampling(self) -> float:
        """GPU memory while a colocated server samples; 0 without one."""
        return self.resting + self.kept + self.serving if self.serving else 0.0

    @property
    def handover(self) -> float:
        """GPU memory during the hand-over to a colocated server; 0 without one."""
        return self.handing + self.kept + self.reading if self.handing else 0.0

    @property
    def peak(self) -> float:
        """Peak memory of a GPU, including a colocated server."""
        return max(self.policy_peak + self.kept, self.handover, self.sampling)


def stage_memory(job: Job, stage: int, spec: Spec = "te") -> StageMemory:
    """Return the memory of one GPU of pipeline stage ``stage``."""
    parameters = stage_parameters(job.shape, job.parallel, stage)
    weights, gradients = parameters.total * job.element, parameters.total * _FP32
    optimizer = 0.0 if job.host_optimizer else optimizer_bytes(job, optimizer_shard(job, parameters))
    flight = _forwards_in_flight(job, stage)
    activations = activation_bytes(job, stage, spec)
    workspace = _workspace(job, stage)
    head, buffers = _head(job, stage, spec), _buffers(job, stage)
    steady = weights + gradients + optimizer + FIXED
    shared = job.has_servers(stage)
    reads = shared and job.weights_by_ipc
    # Too much for a tied model, which gathers its embedding before there are buckets.
    handover_buffers = sync_bytes(job) + 2 * job.run.rollout.sglang.bucket_mb * 2**20
    return StageMemory(
        stage=stage,
        parameters=parameters,
        in_flight=flight,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        workspace=workspace,
        head=head,
        buffers=buffers,
        reserve=FIXED + FRAGMENTATION * (activations + max(workspace, head)),
        saving=steady + 2 * _largest_state(job),  # one state's shards, sent and received
        syncing=steady + sync_bytes(job),
        resting=FIXED if job.offloads else steady,
        kept=job.run.rollout.sglang.kept_gb * GB if shared else 0.0,
        serving=job.engine_fraction * job.gpu.memory if shared else 0.0,
        handing=(weights + FIXED if job.offloads else steady) + handover_buffers if reads else 0.0,
        reading=server_weights(job) if reads else 0.0,
    )


def optimizer_shard(job: Job, parameters: StageParameters) -> float:
    """Return the parameters in a rank's optimizer shard: split over DP x CP, or over ranks with the same
    experts."""
    return parameters.dense / job.optimizer_shards + parameters.experts / job.expert_shards


def optimizer_bytes(job: Job, parameters: float) -> float:
    """Return bytes of optimizer states: float32 Adam moments, and master weights if weights are bfloat16 or
    states are on the host."""
    copies = 2 if job.element == _FP32 and not job.host_optimizer else 3
    return copies * _FP32 * parameters


def activation_bytes(job: Job, stage: int, spec: Spec) -> float:
    """Return a stage's peak activation bytes: saved by all passes in flight, plus one layer's transient.

    The transient is one recomputed layer, or the final norm, which is freed before the first layer is
    recomputed. Every model chunk but the very last also holds its output.
    """
    at, own = job.place(spec), chunk_blocks(job.parallel, job.shape)[stage :: job.parallel.pipeline]
    kept = {block: block_bytes(block, at) for chunk in own for block in chunk}
    transient = max(again for _, again in kept.values())
    layers = max(sum(count * kept[block][0] for block, count in chunk.items()) for chunk in own)
    chunks = _forwards_in_flight(job, stage)
    last = stage == job.parallel.pipeline - 1
    return job.tokens * (chunks * layers + (chunks - last) * at.input + max(at.norm * last, transient))


def block_bytes(block: Block, at: Place) -> tuple[float, float]:
    """Return bytes per token that a layer saves, and those of its recomputation, one layer at a time."""
    parts = [kind.saved(at) for kind in block.kinds]
    whole = sum(part.whole for part in parts)
    return {
        "none": (whole, 0.0),
        "selective": (sum(part.selective for part in parts), max(part.again for part in parts)),
        "full": (at.input, whole - at.shared_input),
    }[at.recompute]


def _forwards_in_flight(job: Job, stage: int) -> int:
    """Return forward passes in flight: by the pipeline schedule, or all if a search holds them."""
    held = job.holds_forwards
    return job.micro_batches if held else in_flight(job.parallel, stage, job.micro_batches)


def sync_bytes(job: Job) -> float:
    """Return weight sync buffers: 2 x the largest parameter, gathered and in shards."""
    return 2.0 * largest_parameter(job.shape) * job.element


def server_weights(job: Job) -> float:
    """Return bytes of a server's weights on one of its GPUs."""
    return total_parameters(job.shape) * job.element / job.run.rollout.sglang.tensor


def host_bytes(job: Job) -> float:
    """Return a node's host memory during a save: (12 + b) bytes per parameter / (DP x CP), and more.

    Master weight, moments and weight are split over DP x CP (``policy/optimizer_state.py``), or over the
    ranks with the same experts. Parameters are written whole, so a rank may write up to the largest one
    beyond its share. A host optimizer is always there, and once more during a save (the writer's
    copy-on-write pages) or a load, which holds one more state. Buffers of an offloaded policy and a frozen
    reference stay allocated.
    """
    shard = largest_shard(job)
    rank = (3 * _FP32 + job.element) * shard + 3 * _largest_state(job)
    if job.host_optimizer:
        bucket = max(_BUCKET, largest_parameter(job.shape) / job.parallel.tensor)
        buffers = 2 * (_FP32 + job.element) * min(bucket, shard)
        rank += optimizer_bytes(job, shard) + _FP32 * shard + buffers
    offloaded = -(-offloaded_bytes(job) // _HOST_BLOCK) * _HOST_BLOCK
    return (rank + offloaded + reference_bytes(job)) * job.gpus_on_node


def largest_shard(job: Job) -> float:
    """Return the parameters of the largest optimizer shard of any stage."""
    stages = range(job.parallel.pipeline)
    return max(optimizer_shard(job, stage_parameters(job.shape, job.parallel, stage)) for stage in stages)


def reference_bytes(job: Job) -> float:
    """Return the frozen reference's host bytes on a largest-stage rank, in whole blocks; 0 without one."""
    if not job.run.algorithm.reference_kl.enabled:
        return 0.0
    return -(-largest_stage_weights(job) // _HOST_BLOCK) * _HOST_BLOCK


def largest_stage_weights(job: Job) -> float:
    """Return bytes of weights on a rank of the largest stage."""
    stages = (stage_parameters(job.shape, job.parallel, stage) for stage in range(job.parallel.pipeline))
    return max(stage.total for stage in stages) * job.element


def offloaded_bytes(job: Job) -> float:
    """Return bytes that a largest-stage rank offloads: weights and GPU optimizer; 0 without offload."""
    if not job.offloads:
        return 0.0
    stages = (stage_memory(job, stage) for stage in range(job.parallel.pipeline))
    return max(stage.weights + stage.optimizer for stage in stages)


def _workspace(job: Job, stage: int) -> float:
    """Return the largest backward workspace of a stage's layers; the MLP's comes first and frees what it
    saved."""
    at = job.place()
    most = 0.0
    for chunk in chunk_blocks(job.parallel, job.shape)[stage :: job.parallel.pipeline]:
        for block in chunk:
            mixer, mlp = (kind.saved(at) for kind in block.kinds)
            most = max(most, mlp.workspace, mixer.workspace - mlp.whole)
    return job.tokens * most


def _head(job: Job, stage: int, spec: Spec) -> float:
    """Return the output layer's memory on the last stage; 0 on others. With full recomputation, minus that of
    a recomputed layer, which comes later and counts in ``activations``.

    Contains one chunk of logits in float32, with a float32 softmax block or, later, the logits' gradient in
    the model's type; all hidden states and their gradient; the output matrix's gradient in float32, plus one
    chunk's part in the model's type.
    """
    if stage != job.parallel.pipeline - 1:
        return 0.0
    vocabulary = job.shape.vocab / job.parallel.tensor
    entries = min(job.run.batch.chunk_tokens(gpu=True), job.tokens) * vocabulary
    gradient = entries * job.element if job.element < _FP32 else 0.0  # otherwise in place of the logits
    logits = entries * _FP32 + max(min(entries, _SOFTMAX_LOGITS) * _FP32, gradient)
    hidden = 2 * job.tokens * job.shape.hidden * job.element
    matrix = vocabulary * job.shape.hidden * (_FP32 + job.element)
    later = 0.0
    if job.run.batch.recompute == "full":  # of it the final norm is freed before
        at, chunks = job.place(spec), chunk_blocks(job.parallel, job.shape)[stage :: job.parallel.pipeline]
        later = max(block_bytes(block, at)[1] for chunk in chunks for block in chunk) - at.norm
    return max(0.0, logits + hidden + matrix - job.tokens * max(0.0, later))


def _buffers(job: Job, stage: int) -> float:
    """Return bytes of pipeline messages, context parallelism's key-value ring, the update's pack columns, and
    the routes of packs in flight."""
    at = job.place()
    pipeline = 2 * job.tokens * at.input if job.parallel.pipeline > 1 else 0.0
    ring = job.tokens * max(kind.saved(at).buffers for kind in job.shape.kinds)
    return pipeline + ring + job.micro_batches * job.tokens * PACK_COLUMNS + _routes(job, stage)


def _routes(job: Job, stage: int) -> float:
    """Return bytes of routes for packs in flight: one or two per layer and expert of a token."""
    experts = job.shape.experts
    if experts is None or job.run.rollout.route_replay == "off":
        return 0.0
    chunks = chunk_blocks(job.parallel, job.shape)[stage :: job.parallel.pipeline]
    layers = max(sum(count for block, count in chunk.items() if block.mlp == experts) for chunk in chunks)
    shape = RouteShape(layers, experts.per_token, experts.count)
    size = layers * experts.per_token * shape.dtype.itemsize
    return float(job.tokens * size * _forwards_in_flight(job, stage))


def _largest_state(job: Job) -> float:
    """Return bytes of the largest parameter's float32 state on a rank; 0 if DP x CP splits nothing."""
    if job.optimizer_shards == 1:
        return 0.0
    return _FP32 * largest_parameter(job.shape) / job.parallel.tensor
