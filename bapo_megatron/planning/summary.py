"""Summary of a plan in five lines: fit, nodes, step time, first checkpoint, disk.

``bapo plan`` prints it below the title, ``bapo submit --dry-run`` beside the job's script. Used by
``commands/cluster/job.py`` and ``page.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from bapo_megatron.planning.hardware import GB, GPUS_PER_NODE
from bapo_megatron.planning.plan import JobPlan


def summary(plan: JobPlan, nodes: str | None = None) -> Iterator[str]:
    """The five lines. ``nodes``: text for the nodes of a cluster file, in place of the plan's own."""
    job, run = plan.job, plan.job.run
    verdict = "FITS" if plan.verdict.fits else "DOES NOT FIT"
    yield (
        f"{verdict}: at most {_peaks(plan)} of a GPU's {job.gpu.memory / GB:.0f} ({job.gpu.name}), "
        f"{plan.host / GB:,.0f} GB of a node's {job.gpu.host_memory / GB:,.0f}"
    )
    yield f"Nodes: {nodes or _nodes(plan)}"
    if isfinite(plan.step_seconds):
        sync = (
            f"changes {plan.handover.seconds:,.0f} s"
            if plan.handover
            else f"sync {plan.sync.expected_seconds:,.0f} s"
        )
        beside = " beside it" if job.overlaps else ""
        yield (
            f"Step: {plan.step_seconds:,.0f} s: training {plan.train_seconds:,.0f} s, sampling "
            f"{plan.sampling_seconds:,.0f} s{beside}, {sync}; {run.steps} steps take "
            f"{duration(plan.run_seconds)} (estimates)"
        )
        steps = min(run.steps, run.checkpoint.every)
        yield f"First checkpoint: step {steps}, after {duration(plan.checkpoint_seconds)}"
    else:
        yield "Step: no estimate, for no engine can sample"
        yield f"First checkpoint: step {min(run.steps, run.checkpoint.every)}"
    kept = run.steps if run.rollout.keep_steps is None else min(run.steps, run.rollout.keep_steps)
    yield (
        f"Disk: {plan.disk / GB:,.0f} GB for checkpoints and weights, {plan.rollouts / GB:,.0f} GB for the "
        f"rollouts of {kept} steps; logs come on top"
    )


def nodes_text(train: int, sample: int) -> str:
    """The nodes of a job and their sum: `8 nodes train + 8 nodes sample = 16 nodes`."""

    def named(count: int) -> str:
        return f"{count} node{'' if count == 1 else 's'}"

    verb = "trains" if train == 1 else "train"
    if not sample:
        return f"{named(train)} {verb}"
    return f"{named(train)} {verb} + {named(sample)} {'samples' if sample == 1 else 'sample'} = " + named(
        train + sample
    )


def duration(seconds: float) -> str:
    """A duration in the unit that suits it: seconds, minutes, hours or days."""
    for size, name, digits in ((86400, "days", 1), (3600, "h", 1), (60, "minutes", 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {name}"
    return f"{seconds:,.0f} s"


def _peaks(plan: JobPlan) -> str:
    """Peak GB of a GPU; with colocated servers that of training and that of sampling."""
    if not plan.job.colocated:
        return f"{max(stage.peak for stage in plan.stages) / GB:.1f} GB"
    train = max(stage.policy_peak + stage.kept for stage in plan.stages)
    sample = max(max(stage.sampling, stage.handover) for stage in plan.stages)
    return f"{train / GB:.1f} GB (training) and {sample / GB:.1f} GB (sampling)"


def _nodes(plan: JobPlan) -> str:
    """The nodes, and the setting that rollout nodes need."""
    job, engines = plan.job, plan.engines
    if job.servers_problem:  # for which `bapo train` alone would refuse it
        return (
            f"{nodes_text(plan.trainer_nodes, plan.server_nodes)}; servers need nodes of their own: "
            f"rollout_nodes in a cluster file, or sglang.urls"
        )
    if job.run.rollout.engine != "sglang" or job.run.rollout.sglang.urls:
        return nodes_text(plan.trainer_nodes, 0)
    if job.colocated:
        first = "of the first " * (plan.trainer_nodes > 1)
        return f"{plan.trainer_nodes}, where {job.gpus} GPUs train and {engines.gpus} {first}sample, in turns"
    if job.gpus + engines.gpus <= GPUS_PER_NODE:
        return f"1, of whose GPUs {job.gpus} train and {engines.gpus} sample"
    return f"{nodes_text(plan.trainer_nodes, 0)}; {engines.gpus} GPUs of the first sample"
