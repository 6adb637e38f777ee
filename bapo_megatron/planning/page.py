"""Text page (``plan_text``) and JSON object (``plan_dict``) of a plan; ``bapo plan`` prints one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from bapo_megatron.algo.bounds import describe, low_values
from bapo_megatron.layers.costs import Recompute
from bapo_megatron.planning.advice import changed_flags, shorter_packs
from bapo_megatron.planning.engine_states import state_lines
from bapo_megatron.planning.engines import environment_lines
from bapo_megatron.planning.job import GB, Job
from bapo_megatron.planning.memory import (
    activation_bytes,
    optimizer_bytes,
    reference_bytes,
    sync_bytes,
)
from bapo_megatron.planning.plan import JobPlan, summary
from bapo_megatron.planning.sizes import active_parameters, total_parameters
from bapo_megatron.planning.speed import Handover, reference_seconds
from bapo_megatron.planning.traffic import DISK_RATE
from bapo_megatron.rollout.engines.pool_state import read_seconds
from bapo_megatron.runtime.text_table import text_table

_FEW_RESPONSES = 4
"""A search over fewer responses often sees one sign alone: over four, with probability 1/8."""
_COLUMNS = (
    ("weights", "weights"),
    ("gradients", "grads"),
    ("optimizer", "optim"),
    ("activations", "activ"),
    ("workspace", "work"),
    ("head", "logits"),
    ("buffers", "comm"),
    ("reserve", "reserve"),
    ("training", "UPDATE"),
    ("saving", "SAVE"),
    ("syncing", "SYNC"),
)


def plan_text(plan: JobPlan, advice: Sequence[JobPlan], others: Sequence[JobPlan]) -> str:
    """Return the plan's text page."""
    sections = [
        _title(plan),
        summary(plan),
        _bounds(plan.job),
        _memory(plan),
        _colocated_memory(plan),
        _recomputation(plan),
        _host_and_sync(plan),
        _shorter_packs(plan),
        _traffic(plan),
        _speed(plan),
        _engines(plan),
        environment_lines(plan.job, plan.engines),
        *([_comparison(plan, others)] if others else []),
        _verdict(plan, advice),
    ]
    return "\n\n".join(filter(None, ("\n".join(section) for section in sections))) + "\n"


def plan_dict(
    plan: JobPlan, advice: Sequence[JobPlan] = (), others: Sequence[JobPlan] = ()
) -> dict[str, Any]:
    """Return the plan's JSON object, in bytes, FLOPs and seconds."""
    return {
        "recipe": plan.job.run.name,
        "gpu": plan.job.gpu.name,
        "gpus": plan.job.gpus,
        "budget": plan.job.budget,
        "stages": [
            {
                **{name: value for name, value in vars(stage).items() if name != "parameters"},
                "parameters": stage.parameters.total,
                "training": stage.training,
                "handover": stage.handover,
                "sampling": stage.sampling,
                "peak": stage.peak,
            }
            for stage in plan.stages
        ],
        "host": plan.host,
        "shorter_packs": [_changed(plan, shorter) for shorter in shorter_packs(plan)],
        "fastest_layouts": [_changed(plan, other) | {"speed": vars(other.speed)} for other in others],
        "speed": vars(plan.speed),
        "traffic": [vars(part) for part in (*plan.traffic, plan.sync)],
        "engines": {
            **vars(plan.engines),
            "states": states.values() if (states := plan.engines.states) else None,
        },
        "turns": vars(plan.handover) if plan.handover else None,
        "servers_problem": plan.job.servers_problem,
        "train_seconds": plan.train_seconds,
        "sampling_seconds": plan.sampling_seconds,
        "step_seconds": plan.step_seconds,
        "run_seconds": plan.run_seconds,
        "checkpoint_seconds": plan.checkpoint_seconds,
        "disk": plan.job.disk,
        "rollouts": plan.job.rollouts,
        "trainer_nodes": plan.trainer_nodes,
        "server_nodes": plan.server_nodes,
        "fits": plan.verdict.fits,
        "misfits": plan.verdict.problems,
        "advice": [_changed(plan, change) for change in advice],
    }


def _changed(plan: JobPlan, other: JobPlan) -> dict[str, Any]:
    return {"flags": changed_flags(plan, other), "gpus": other.job.gpus, "peak": other.peak}


def layout_name(job: Job) -> str:
    """Return the parallel layout in one short line."""
    p = job.parallel
    virtual = f" x {p.virtual}" if p.virtual > 1 else ""
    if p.pipeline_layers:
        virtual += f" ({' '.join(map(str, p.pipeline_layers))} layers)"
    sequence = " + SP" if p.sequence else ""
    experts = f", EP {p.expert}" if p.expert > 1 else ""
    experts += f", ETP {p.expert_tensor}" if p.expert_tensor > 1 else ""
    return f"TP {p.tensor}{sequence}, PP {p.pipeline}{virtual}, CP {p.context}, DP {job.replicas}{experts}"


def _title(plan: JobPlan) -> Iterator[str]:
    job, batch = plan.job, plan.job.run.batch
    parameters = f"{_count(total_parameters(job.shape))} parameters"
    active = f", {_count(active_parameters(job.shape))} of a token" if job.shape.experts else ""
    yield f"{job.run.name}: {parameters}{active}, {job.gpus} x {job.gpu.name}"
    yield (
        f"{layout_name(job)}; packs of {batch.pack_tokens:,} tokens, {job.tokens:,.0f} a GPU; "
        f"recompute {batch.recompute}"
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _bounds(job: Job) -> Iterator[str]:
    seen, bounds = job.responses_per_search, job.run.algorithm.bounds
    if seen is None:
        return
    yield f"Clipping bounds: {describe(bounds)}"
    yield f"  one search sees about {seen:,.1f} responses, if they have {job.mean_response:,.0f} tokens"
    if seen < _FEW_RESPONSES:
        yield (
            f"  WARNING: if half of them are rewarded, {2 ** (1 - seen):.0%} of the searches see one sign "
            f"alone and balance nothing: they"
        )
        yield (
            f"  clip as fixed bounds of {low_values(bounds)[-1]:g} and {bounds.high_start:g} do. Raise "
            f"algorithm.bounds.bounds_tokens, or set it to None and algorithm.bounds.scope to update"
        )


def _memory(plan: JobPlan) -> Iterator[str]:
    memory = plan.job.gpu.memory / GB
    yield f"GB on a GPU of each pipeline stage; it may use {plan.job.budget / GB:.1f} of {memory:.0f}"
    header = ["stage", "layers", "in flight", "params B", *(title for _, title in _COLUMNS), ""]
    rows = [header]
    for stage in plan.stages:
        values = [getattr(stage, name) / GB for name, _ in _COLUMNS]
        shape = [str(stage.stage), str(stage.parameters.layers), str(stage.in_flight)]
        verdict = "fits" if stage.policy_peak + stage.kept <= plan.job.budget else "OVER"
        rows.append([*shape, f"{stage.parameters.total / 1e9:.3f}", *(f"{v:.1f}" for v in values), verdict])
    rows.append(_model_row(plan))
    yield from aligned(rows)
    yield "UPDATE, SAVE and SYNC are peaks at different times; work, comm and reserve are estimates."


def _colocated_memory(plan: JobPlan) -> Iterator[str]:
    if plan.handover is None:
        return
    free = plan.job.gpu.memory - plan.job.budget
    yield f"GB on a GPU while the policy trains, and while servers sample; {free / GB:.1f} must stay free"
    rows = [["stage", "turn", "policy", "servers", "total", "free", ""]]
    for stage in plan.stages:
        both = [("train", stage.policy_peak, stage.kept)]
        if stage.handing:
            both.append(("hand over", stage.handing, stage.kept + stage.reading))
        if stage.serving:
            both.append(("sample", stage.resting, stage.kept + stage.serving))
        for turn, policy, servers in both:
            total = policy + servers
            left = plan.job.gpu.memory - total
            values = [f"{value / GB:.1f}" for value in (policy, servers, total, left)]
            rows.append([str(stage.stage), turn, *values, "fits" if total <= plan.job.budget else "OVER"])
    yield from aligned(rows, left=2)
    yield _handover(plan.handover)


def _handover(handover: Handover) -> str:
    policy = (
        f"{handover.moved / GB:.1f} GB a GPU to the host and back, {handover.moving_seconds:,.1f} s"
        if handover.moved
        else "the policy stays (parallel.offload is off)"
    )
    reading = (
        f"from the policy's memory: copies {handover.reading_seconds:,.1f} s, expected "
        f"{handover.expected_reading_seconds:,.1f} s (measured with miles)"
        if handover.by_handles
        else f"from the disk: {handover.reading_seconds:,.1f} s at {DISK_RATE / GB:.0f} GB/s"
    )
    return f"Changes of a step: {policy}; servers read {handover.read / GB:.1f} GB of weights {reading}"


def _model_row(plan: JobPlan) -> list[str]:
    """The whole model: one copy of its weights, gradients and optimizer state."""
    job = plan.job
    parameters = total_parameters(job.shape)
    copies = (job.element, 4, optimizer_bytes(job, 1))
    whole = [f"{parameters * size / GB:.1f}" for size in copies]
    blank = [""] * (len(_COLUMNS) - len(whole) + 1)
    return ["model", str(job.shape.layers), "", f"{parameters / 1e9:.3f}", *whole, *blank]


def _recomputation(plan: JobPlan) -> Iterator[str]:
    yield f"Activations in GB by recomputation, at {plan.job.tokens:,.0f} tokens a GPU (* as planned)"
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    chosen = plan.job.run.batch.recompute
    rows = [["stage", *(f"{mode}*" if mode == chosen else mode for mode in modes)]]
    for stage in plan.stages:
        values = []
        for mode in modes:
            batch = replace(plan.job.run.batch, recompute=mode)
            job = replace(plan.job, run=replace(plan.job.run, batch=batch))
            values.append(f"{activation_bytes(job, stage.stage, 'te') / GB:.1f}")
        rows.append([str(stage.stage), *values])
    yield from aligned(rows)


def _shorter_packs(plan: JobPlan) -> Iterator[str]:
    job, plans = plan.job, shorter_packs(plan)
    if not plans:
        return
    yield (
        f"Packs have room for {job.run.batch.pack_tokens:,} tokens, and the longest sequence has "
        f"{job.run.longest_sequence:,}; training takes {plan.peak / GB:.1f} GB of a GPU, and with"
    )
    for other in plans:
        yield (
            f"  {' '.join(changed_flags(plan, other))}: {other.peak / GB:.1f} GB on {other.job.gpus} GPUs, "
            f"{other.speed.tokens_per_second:,.0f} tokens/s/GPU"
        )


def _host_and_sync(plan: JobPlan) -> Iterator[str]:
    job, checkpoint = plan.job, total_parameters(plan.job.shape) * (plan.job.element + 12)
    yield (
        f"Host memory of a node while it saves: {plan.host / GB:,.0f} GB of the {job.host_budget / GB:,.0f} "
        f"that it may use, {job.options.memory_fraction:.0%} of its {job.gpu.host_memory / GB:,.0f}; the "
        f"checkpoint has {checkpoint / GB:,.0f} GB"
    )
    if not job.samples:
        return
    way = (
        "see the changes of a step"
        if plan.job.weights_by_ipc
        else f"wire {plan.sync.seconds:.1f} s at one network port, expected "
        f"{plan.sync.expected_seconds:.1f} s ({plan.sync.basis})"
    )
    yield (
        f"Weight sync: {plan.sync.sent / GB:.1f} GB through buffers of "
        f"{sync_bytes(plan.job) / GB:.1f} GB a GPU, {way}"
    )
    engine, writers = plan.job.run.rollout.engine_config, plan.job.parallel.model_size
    if engine.sync == "disk":
        minutes = engine.update_minutes + read_seconds(plan.sync.sent) / 60
        yield (
            f"  from disk: {writers} ranks write {plan.sync.sent / writers / GB:.1f} GB each; "
            f"a server that takes longer than {minutes:.0f} minutes to load them counts as hung"
        )


def _traffic(plan: JobPlan) -> Iterator[str]:
    yield "Communication of one update: sent by the busiest GPU, and seconds at the link's stated rate"
    if not plan.traffic:
        yield "  none"
        return
    rows = [["", "GB", "s", "over"]]
    rows += [[t.name, f"{t.sent / GB:,.1f}", f"{t.seconds:,.1f}", t.link] for t in plan.traffic]
    yield from aligned(rows)
    if plan.job.parallel.expert > 1:
        source = "--expert-imbalance" if plan.job.options.expert_routes is None else "measured from routes"
        yield (
            f"Experts: the busiest rank of EP is taken to get {plan.job.expert_imbalance:.3g} times the mean "
            f"of the copies ({source}), in memory, messages and time"
        )


def _speed(plan: JobPlan) -> Iterator[str]:
    job, s = plan.job, plan.speed
    yield (
        f"FLOPs per token: {s.flops_per_token / 1e9:,.1f} G for a training pass in sequences of "
        f"{job.typical_length:,.0f} tokens ({s.flops_per_token_longest / 1e9:,.1f} G at "
        f"{job.run.longest_sequence:,}); {s.executed_per_token / 1e9:,.1f} G executed"
    )
    yield (
        f"At {job.options.mfu:.0%} of {job.gpu.peak / 1e12:,.0f} TFLOP/s in matrices, "
        f"{job.options.attention_mfu:.0%} in attention: "
        f"{s.tokens_per_second:,.0f} tokens/s/GPU, {s.idle:.0%} idle, {s.model_utilization:.0%} model FLOPs"
    )
    less = f" (the first takes {s.known_seconds:,.0f} s less)" if s.known_seconds else ""
    yield (
        f"An update of {s.micro_batches} packs a replica: {s.update_seconds:,.0f} s, of which "
        f"{s.forward_seconds:,.0f} s forward only; {job.updates} a step: {plan.train_seconds:,.0f} s{less}"
    )
    if job.packs_fill < 1:
        yield (
            f"  WARNING: its {job.tokens_per_update:,.0f} tokens fill {job.packs_fill:.0%} of one pack of "
            f"each of {job.replicas} replicas; more of them make no step shorter. Lower parallel.data,"
        )
        yield "  or raise parallel.context or rollout.prompts_per_step"
    if plan.stepping_seconds:
        yield f"  and {plan.stepping_seconds:,.1f} s to step the optimizer on the host"
    if swapping := reference_seconds(job):
        yield (
            f"  of it {swapping:,.1f} s in which the frozen reference and the policy swap places; the "
            f"reference takes {reference_bytes(job) / GB:,.1f} GB of host memory a GPU"
        )


def _engines(plan: JobPlan) -> Iterator[str]:
    if not plan.job.samples:
        return
    e, size = plan.engines, plan.job.run.rollout.sglang.tensor
    longest = plan.job.run.longest_sequence
    yield (
        f"Engines: {e.count} of {size} GPUs; a GPU holds {e.weights / GB:.1f} GB of weights "
        f"and {e.cache / GB:.1f} GB of KV cache"
    )
    yield (
        f"  {e.cache_per_token / 1024:,.0f} KiB a token: an engine holds {e.longest_sequences} sequences of "
        f"{longest:,} tokens, or runs {e.running:,.0f} at the assumed lengths"
    )
    yield from state_lines(plan.job, e.states, e.count)
    more = plan.job.sampled_responses - plan.job.responses
    dropped = f", {more} of them of dropped groups" if more else ""
    yield (
        f"Estimate of sampling: {e.tokens_per_second:,.0f} tokens/s at full batches, {e.step_seconds:,.0f} s "
        f"for {plan.job.sampled_responses} responses of {plan.job.mean_response:,.0f} tokens{dropped}"
    )
    yield (
        f"  until the last one ends {e.rollout_seconds:,.0f} s ({e.cut_share:.0%} reach "
        f"{plan.job.run.rollout.max_response_tokens:,} tokens); one alone takes {e.longest_seconds:,.0f} s"
    )


def _comparison(plan: JobPlan, others: Sequence[JobPlan]) -> Iterator[str]:
    yield f"Fastest layouts of {plan.job.gpus} GPUs that fit, by tokens/s/GPU with no communication hidden"
    rows = [
        ["layout", "packs", "recompute", "UPDATE", "SAVE", "idle", "tokens/s/GPU", "links s", "not hidden"]
    ]
    for other in others:
        peaks = [max(getattr(m, name) for m in other.stages) / GB for name in ("training", "saving")]
        s = other.speed
        rows.append(
            [
                layout_name(other.job),
                f"{other.job.run.batch.pack_tokens:,}",
                other.job.run.batch.recompute,
                *(f"{peak:.1f}" for peak in peaks),
                f"{s.idle:.0%}",
                f"{s.tokens_per_second:,.0f}",
                f"{s.link_seconds:,.1f}",
                f"{1 / other.cost:,.0f}",
            ]
        )
    yield from aligned(rows, left=2)


def _verdict(plan: JobPlan, advice: Sequence[JobPlan]) -> Iterator[str]:
    if plan.verdict.fits:
        return
    yield "DOES NOT FIT"
    yield from (f"  {line}" for line in plan.verdict.problems)
    for change in advice:
        flags, gpus = " ".join(changed_flags(plan, change)), change.job.gpus
        same = gpus == plan.job.gpus
        title = f"Smallest change on these {gpus} GPUs" if same else "Smallest change"
        yield f"{title}: {flags}" + ("" if same else f"  (takes {gpus} GPUs)")
    if plan.verdict.memory and not advice:
        yield "No change of layout, recomputation or pack length within reach fits; use larger GPUs."


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a table's lines, the first ``left`` columns flush left, the others flush right."""
    return text_table(rows, right=range(left, len(rows[0])), indent=2) if rows else []
