"""Layout search of ``bapo plan``: the smallest change that fits in memory, and the fastest layouts.

``smallest_changes`` returns the flags of such a change, ``fastest_layouts`` plans for the same GPUs,
``shorter_packs`` plans with shorter packs, ``problems`` messages about a job's invalid settings. Cheap rules
drop most of up to ten thousand candidates; at most a few hundred are planned, by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from bapo_megatron.algo.settings import out_of_range, wrong_types
from bapo_megatron.config import ParallelConfig
from bapo_megatron.config.validation import flat, run_problems
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.memory import stage_memory
from bapo_megatron.planning.plan import JobPlan, make_plan
from bapo_megatron.policy.layout import layout_problems

_MODES = ("none", "selective", "full")
_MOST_TENSOR = 8  # beyond a node, traffic leaves NVLink
_OFFLOAD = "--parallel.offload"


def problems(job: Job) -> list[str]:
    """Return the messages about a job's invalid settings; memory is not judged."""
    ranged = not any((*wrong_types(job.parallel), *out_of_range(job.parallel)))
    messages = list(layout_problems(job.parallel, job.shape)) if ranged else []
    try:
        job.run.check()
    except ConfigError as error:
        messages += str(error).splitlines()
    return messages


def _broken_rules(job: Job) -> list[str]:
    """Return ``problems`` of a search candidate, whose types need no check, in half the time."""
    return [*layout_problems(job.parallel, job.shape), *run_problems(job.run)]


def smallest_changes(plan: JobPlan) -> list[JobPlan]:
    """Return plans of the smallest change that makes training fit and, if different, of the smallest on the
    same GPUs.

    Ordered by number of flags, then GPUs, then GPU time per token (``JobPlan.cost``). ``parallel.offload``
    does not count as a flag: it belongs to colocated servers. Empty if none was found.
    """
    best: dict[bool, tuple[tuple[int, int, float], JobPlan]] = {}
    before = flat(plan.job.run)
    for job in _neighbours(plan.job):
        flags = _difference(before, flat(job.run))
        count = len(flags) - (_OFFLOAD in flags)
        places = [same for same in (False, True) if not same or job.gpus == plan.job.gpus]
        places = [same for same in places if same not in best or count <= best[same][0][0]]
        if not flags or not places or _broken_rules(job):
            continue
        other = make_plan(job)
        if other.verdict.memory or (plan.engines.fits and not other.engines.fits):
            continue
        rank = (count, job.gpus, other.cost)
        for same in places:
            if same not in best or rank < best[same][0]:
                best[same] = rank, other
    changes = [best[same][1] for same in (False, True) if same in best]
    return changes[:1] if changes[1:] and changes[0] is changes[1] else changes


def shorter_packs(plan: JobPlan) -> list[JobPlan]:
    """Return plans with packs of just the longest sequence: of this layout, and of the fewest GPUs that fit.

    The second, if any, has less context parallelism; without it, the first must free a tenth of a GPU. Empty
    if packs are less than twice as long, or bounds are searched per pack, so that pack length matters.
    """
    job = plan.job
    least = job.parallel.pack_tokens_for(job.run.longest_sequence)
    if not _packs_are_free(job) or job.run.batch.pack_tokens < 2 * least:
        return []
    same = make_plan(_with(job, job.parallel, True))
    contexts = [n for n in range(1, job.parallel.context) if job.parallel.context % n == 0]
    smaller = (_with(job, replace(job.parallel, context=context), True) for context in contexts)
    fitting = (
        other
        for candidate in smaller
        if not _broken_rules(candidate) and (other := make_plan(candidate)).verdict.fits
    )
    fewest = next(fitting, None)
    if fewest is not None:
        return [same, fewest]
    return [same] if plan.peak - same.peak > 0.1 * job.budget else []


def _packs_are_free(job: Job) -> bool:
    """Whether pack length changes no result; it does if bounds are searched per pack."""
    return job.run.algorithm.bounds.sums_over != "micro_batch"


def changed_flags(before: JobPlan, after: JobPlan) -> list[str]:
    """Return the flags that turn one plan's job into another's."""
    return _difference(flat(before.job.run), flat(after.job.run))


def fastest_layouts(plan: JobPlan, count: int) -> list[JobPlan]:
    """Return plans of the ``count`` fastest layouts that fit in the same GPUs' memory, with no communication
    hidden (``JobPlan.cost``). Packs keep their length, or hold just the longest sequence."""
    if not count:
        return []
    plans = [make_plan(job) for job in _layouts(plan.job) if not _broken_rules(job)]
    fitting = [other for other in plans if not other.verdict.memory]
    return sorted(fitting, key=lambda other: other.cost)[:count]


def _neighbours(job: Job) -> Iterator[Job]:
    """Yield the job's neighbours in the search: less memory, CP and DP in both directions. With colocated
    servers first an offloaded policy and smaller servers, which keep the training layout."""
    if job.colocated:
        yield _offloaded(job)
        job = _with_fitting_engines(job)
        yield job
    yield from _memory_saving(job)


def _with_fitting_engines(job: Job) -> Job:
    """Return the job with an offloaded policy, and a ``memory_fraction`` (in steps of 0.05) that fits."""
    job = _offloaded(job)
    stages = (stage_memory(job, stage) for stage in range(job.parallel.pipeline))
    rooms = (job.budget - stage.resting - stage.kept for stage in stages if stage.serving)
    room = min(rooms, default=job.budget)
    sglang = job.run.rollout.sglang
    fraction = math.floor(20 * room / job.gpu.memory) / 20
    if not 0 < fraction < sglang.memory_fraction:
        return job
    rollout = replace(job.run.rollout, sglang=replace(sglang, memory_fraction=fraction))
    return replace(job, run=replace(job.run, rollout=rollout))


def _offloaded(job: Job) -> Job:
    return replace(job, run=replace(job.run, parallel=replace(job.parallel, offload=True)))


def _memory_saving(job: Job) -> Iterator[Job]:
    """Yield variants with less memory: recompute modes, layouts, shorter packs, or a host optimizer."""
    p, batch = job.parallel, job.run.batch
    modes = _MODES[_MODES.index(batch.recompute) :]
    on_host = replace(job, run=replace(job.run, optimizer=replace(job.run.optimizer, device="cpu")))
    for mode in modes:
        yield _with(on_host, p, False, recompute=mode)
    tensors = [n for n in (p.tensor << k for k in range(4)) if n <= _MOST_TENSOR]
    for mode, tensor, sequence, context, pipeline, data, expert, chunk, shortest in product(
        modes,
        tensors or [p.tensor],
        {p.sequence, True},
        [n for n in (p.context // 4, p.context // 2, *(p.context << k for k in range(4))) if n],
        (p.pipeline, 2 * p.pipeline, 4 * p.pipeline),
        [n for n in (job.replicas // 2, job.replicas, 2 * job.replicas, 4 * job.replicas) if n],
        [p.expert << k for k in range(3 if job.shape.experts else 1)],
        dict.fromkeys((batch.logprob_chunk_tokens, min(1024, batch.chunk_tokens(gpu=True)))),
        (False, True),
    ):
        layout = replace(p, tensor=tensor, sequence=sequence, context=context, expert=expert)
        if data != job.replicas:
            layout = replace(layout, data=data)
        if pipeline != p.pipeline:
            layout = replace(layout, pipeline=pipeline, pipeline_layers=())
        yield _with(job, layout, shortest, recompute=mode, logprob_chunk_tokens=chunk)


def _layouts(job: Job) -> Iterator[Job]:
    powers = [2**n for n in range(job.gpus.bit_length())]
    experts = sorted({job.parallel.expert, *powers}) if job.shape.experts else [job.parallel.expert]
    tensors = [n for n in powers if n <= _MOST_TENSOR]
    for tensor, pipeline, context, expert in product(tensors, powers, powers, experts):
        data, rest = divmod(job.gpus, tensor * pipeline * context)
        if rest or not data:
            continue
        layout = replace(
            job.parallel,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            data=data,
            expert=expert,
            virtual=1,
            pipeline_layers=(),
            sequence=tensor > 1,
        )
        is_longer = layout.pack_tokens_for(job.run.longest_sequence) < job.run.batch.pack_tokens
        for mode, is_short in product(_MODES, {False, _packs_are_free(job) and is_longer}):
            yield _with(job, layout, is_short, recompute=mode)


def _with(job: Job, layout: ParallelConfig, shortest: bool, **batch: Any) -> Job:
    run = replace(job.run, parallel=layout, batch=replace(job.run.batch, **batch))
    if shortest:
        least = run.parallel.pack_tokens_for(run.longest_sequence)
        run = replace(run, batch=replace(run.batch, pack_tokens=min(least, run.batch.pack_tokens)))
    return replace(job, run=run)


def _difference(before: dict[str, object], after: dict[str, object]) -> list[str]:
    # True and an empty list take no value.
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True or value == () else f" {value}")
        for name, value in after.items()
        if value != before[name]
    ]
