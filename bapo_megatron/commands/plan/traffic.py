"""Communication estimate of ``bapo plan``: bytes that one GPU sends in an update, and seconds on its link.

A collective over n ranks on a message of M bytes (whole) sends (n - 1) / n M from each rank for an
all-gather or a reduce-scatter, and twice that for an all-reduce (ring algorithms). Used by ``plan.py``,
``speed.py`` and ``sync.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapo_megatron.commands.plan.hardware import GPUS_PER_NODE
from bapo_megatron.commands.plan.job import Job
from bapo_megatron.commands.plan.sizes import stage_parameters
from bapo_megatron.policy.layout import stage_layers


@dataclass(frozen=True)
class Traffic:
    """Volume and duration of one kind of communication on its link; the base class of ``Sync``."""

    name: str
    sent: float
    """Bytes that the busiest GPU sends in an update."""
    seconds: float
    """Seconds at the link's stated rate; how much of it hides behind computation is not modelled."""
    link: str


def update_traffic(job: Job) -> list[Traffic]:
    """Communication of an update by kind of parallelism: TP, CP, PP and DP, where the layout has them."""
    p = job.parallel
    reach = {"TP": p.tensor, "CP": p.tensor * p.context}
    reach["DP"] = reach["CP"] * job.replicas
    reach["PP"] = reach["DP"] * p.pipeline
    volumes = {"TP": _tensor(job), "CP": _context(job), "PP": _pipeline(job), "DP": _data(job)}
    return [_on_link(job, name, sent, reach[name]) for name, sent in volumes.items() if sent]


def forward_passes(job: Job) -> float:
    """Number of forward-only passes of an update, a fraction where several updates share one.

    A loss that must know something of a whole update (clipping bounds, the ratios of responses) takes one,
    unless that is known, as fixed bounds are, or ``batch.hold_forwards`` keeps the training forward passes.
    Of a loss by a dotted path one is counted.
    The first update of a step may need none, since its ratios are known; the plan counts the dearer updates.
    With ``old_log_probs`` "trainer", pi_old takes one pass over the tokens of the step, shared by the
    ``reuse_epochs``; so does a frozen reference. The off-policy sequence mask takes one of its own.
    """
    from bapo_megatron.algo.losses import build_loss  # it needs torch, and `--help` does not need it

    algorithm = job.run.algorithm
    if ":" in algorithm.loss:  # it may be there on the machines of the run alone: the dearer case
        searched = True
    else:
        search = build_loss(algorithm).search
        searched = search is not None and search.known is None and search.scope == "update"
    passes = 1.0 if searched and not job.run.batch.hold_forwards else 0.0
    passes += 0.0 if algorithm.corrections.off_policy_delta is None else 1.0
    of_step = (algorithm.old_log_probs == "trainer") + algorithm.reference_kl.enabled
    return passes + of_step / algorithm.reuse_epochs


def _on_link(job: Job, name: str, sent: float, ranks: int) -> Traffic:
    """The traffic of a group: on NVLink if its ``ranks`` lie in one node, else on the network.

    Megatron numbers ranks TP first, then CP, DP, PP; ``ranks`` counts those of the group's kind and before.
    """
    inside = ranks <= GPUS_PER_NODE
    rate = job.gpu.nvlink if inside else job.gpu.network
    return Traffic(name, sent, sent / rate, "NVLink" if inside else "network")


def _per_update(job: Job) -> float:
    """Tokens of a rank over all micro-batches of an update."""
    return job.tokens * job.micro_batches


def _tensor(job: Job) -> float:
    """Bytes of TP: four collectives of a layer forward, four backward.

    The four are two all-reduces, or under SP two pairs of an all-gather and a reduce-scatter. Under SP the
    backward pass also gathers both matrices' inputs again.
    """
    size = job.parallel.tensor
    message = _per_update(job) * job.shape.hidden * job.element * (size - 1) / size
    backward = 6 if job.parallel.sequence else 4
    again = {"none": 0, "selective": 2, "full": 4}[job.run.batch.recompute]
    layers = max(stage_layers(job.parallel, job.shape.layers))
    body = layers * (4 + backward + again + 4 * forward_passes(job))
    return message * (body + 2)  # and the output layer's input and gradient


def _context(job: Job) -> float:
    """Bytes of CP: keys and values go round the ring once forward, and with their gradients backward."""
    size = job.parallel.context
    width = 2 * job.shape.kv_heads * job.shape.head_dim / job.parallel.tensor
    again = 0 if job.run.batch.recompute == "none" else 1
    layers = max(stage_layers(job.parallel, job.shape.layers))
    return layers * _per_update(job) * width * job.element * (size - 1) * (3 + again + forward_passes(job))


def _pipeline(job: Job) -> float:
    """Bytes of PP: hidden states to the next stage and their gradients back, for each model chunk."""
    if job.parallel.pipeline == 1:
        return 0.0
    message = _per_update(job) * job.shape.hidden * job.element / job.norm_split
    return message * job.parallel.virtual * (2 + forward_passes(job))


def _data(job: Job) -> float:
    """Bytes of DP: float32 gradients are reduce-scattered and weights all-gathered over DP x CP."""
    ranks = job.optimizer_shards
    parameters = stage_parameters(job.shape, job.parallel, 0).total
    return parameters * (4 + job.element) * (ranks - 1) / ranks
