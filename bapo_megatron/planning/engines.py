"""Engines of a plan: KV cache, sampling time of a step, and open responses with environments.

``engine_plan`` returns memory and speed of a run's engines; ``environment_lines`` says whether they stay busy
while environments work.

Decoding is taken as bound by memory bandwidth: a decode step reads the weights once (of a model with experts,
those that some sequence uses) and the KV cache of every sequence (Pope et al. 2022, "Efficiently Scaling
Transformer Inference", arXiv 2211.05102, section 2). It also reads and writes the state of every sequence in
layers with one (Gated DeltaNet, ``engine_states.py``), whose cache may limit concurrent requests. Without
partial rollout, sampling ends with the step's last response (lengths by ``lengths.py``); steps with few
responses read the weights, too. Scheduling, the engine's collectives and scoring are left out.

A response whose environment works occupies no decode slot of an engine, a *place*. P places stay filled if

    1.25 P (1 + w t / s) <= A   t seconds of an environment step, s seconds of sampling per turn,
                                w share of the prompts that have an environment

where A is the limit of open responses. P (1 + w t / s) is Little's law; the extra quarter covers complete
responses that wait for their groups: measured, 97 to 98 % of the places are filled with it, 82 to 94 %
without (benchmarks/results/sampler_scale.md). The sampler (``rollout/sampler/dispatcher.py``) admits

    A = S B G                   while the policy trains: max_staleness S of 1 or more, with overlap
    A = (S + 1) B G             without overlap, or with S = 0: engines sample only while training waits

B prompts_per_step, G group_size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from bapo_megatron.config import RunConfig
from bapo_megatron.hf.config import ModelShape, linear_flops_per_token
from bapo_megatron.planning.engine_states import StateCache, state_cache
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.lengths import (
    ResponseLengths,
    busiest_engine_responses,
    decode_steps,
    read_tokens,
)
from bapo_megatron.planning.sizes import read_parameters, total_parameters

SPARE = 1.25
"""Ratio of open responses to Little's law: some wait for the rest of their group."""


@dataclass(frozen=True)
class EnginePlan:
    """Estimate for a run's inference engines: their number and GPUs, bytes of weights and caches per GPU,
    sequences decoded at a time, tokens per second, and seconds to sample a step."""

    gpus: int
    count: int
    weights: float
    """Bytes of weights on each GPU."""
    cache: float
    """Bytes of KV cache on each GPU."""
    cache_per_token: int
    """Bytes of one token's keys and values in all layers, summed over an engine's TP ranks."""
    states: StateCache | None
    """Cache of layer states; None for a model without them."""
    longest_sequences: int
    """Sequences of the longest length that fit one engine's cache."""
    running: float
    """Sequences decoded at a time by one engine, at a running sequence's mean length."""
    tokens_per_second: float
    """Estimated tokens sampled per second by all engines."""
    step_seconds: float
    """Estimated seconds for a step's responses at full decode batches, as if unfinished responses continue in
    the next step (``max_staleness`` of 1 or more)."""
    rollout_seconds: float
    """Estimated seconds until a step's last response is done, with prefill and the tail of few running
    responses."""
    prefill_seconds: float
    """Part of ``rollout_seconds`` for prompts, one prefill per response: an upper estimate, since engines may
    share a group's prompt."""
    cut_share: float
    """Share of responses that reach the longest length, by the assumed distribution."""
    longest_seconds: float
    """Estimated seconds for one longest response alone on its engine: the minimum for a step with one."""

    @property
    def fits(self) -> bool:
        """Whether an engine can hold one full-length sequence and one request's states."""
        return (
            self.count > 0 and self.longest_sequences >= 1 and (not self.states or self.states.requests > 0)
        )


def cache_bytes_per_token(shape: ModelShape) -> int:
    """Return bytes of one token's keys and values in bfloat16, all layers."""
    return sum(len(shape.layers_of(kind)) * kind.decoding().per_token for kind in shape.kinds)


def engine_plan(job: Job) -> EnginePlan:
    """Return the estimate for ``engine_gpus`` GPUs in engines of ``rollout.sglang.tensor`` GPUs each."""
    options, gpu = job.options, job.gpu
    sglang = job.run.rollout.sglang
    size = sglang.tensor
    beside = job.run.rollout.engine == "sglang" and not sglang.urls and job.servers_problem is None
    gpus = options.engine_gpus or (sglang.servers * size if beside else max(job.gpus, size))
    weights = total_parameters(job.shape) * 2.0 / size
    room = max(0.0, job.engine_fraction * gpu.memory - weights)
    states = state_cache(job, room)
    cache = room - (states.reserved if states else 0.0)
    per_token = cache_bytes_per_token(job.shape)
    count = gpus // size
    # SGLang splits the cache by KV heads; ranks beyond the number of heads hold copies.
    split = min(size, max(kind.decoding().heads for kind in job.shape.kinds))
    tokens = cache * split / per_token
    lengths = job.lengths
    present = job.mean_prompt + lengths.running_mean
    share = busiest_engine_responses(job.sampled_responses, count, options.engine_imbalance)
    slots = min(tokens / present, job.max_in_flight, states.requests if states else math.inf)
    running = min(slots, job.sampled_responses / max(1, count))
    bandwidth = options.engine_bandwidth * gpu.memory_bandwidth
    token_seconds = per_token / split / bandwidth
    state_seconds = 2 * states.per_sequence / size / bandwidth if states else 0.0  # read and written

    def weight_seconds(sequences: float) -> float:
        return read_parameters(job.shape, sequences) * 2.0 / size / bandwidth

    of_step = weight_seconds(running) + running * (present * token_seconds + state_seconds)
    rate = count * running / of_step
    longest = job.run.rollout.max_response_tokens
    prompts = share * job.mean_prompt * linear_flops_per_token(job.shape)
    prefill = prompts / size / (options.mfu * gpu.peak)
    busiest = _busiest(lengths, share, job.sampled_responses, max(1, int(slots)), job.mean_prompt)
    # In the tail, fewer experts are read: use the mean number of running responses over the steps.
    steps = busiest[0]
    sampled = share * job.mean_response
    decoding = steps * weight_seconds(sampled / steps) + token_seconds * busiest[1] + state_seconds * sampled
    return EnginePlan(
        gpus=gpus,
        count=count,
        weights=weights,
        cache=cache,
        cache_per_token=per_token,
        states=states,
        longest_sequences=int(tokens // job.run.longest_sequence),
        running=running,
        tokens_per_second=rate,
        step_seconds=job.sampled_responses * job.mean_response / rate if rate else float("inf"),
        rollout_seconds=prefill + decoding if rate else float("inf"),
        prefill_seconds=prefill,
        cut_share=lengths.cut_share,
        longest_seconds=longest * (weight_seconds(1) + longest / 2 * token_seconds + state_seconds),
    )


@lru_cache(maxsize=256)
def _busiest(
    lengths: ResponseLengths, share: int, responses: int, slots: int, prompt: float
) -> tuple[float, float]:
    """Return the busiest engine's decode steps and KV entries read. Cached for the layout search."""
    busiest = lengths.busiest_engine_lengths(share, responses)
    return decode_steps(busiest, slots), read_tokens(busiest, prompt)


def environment_lines(job: Job, engines: EnginePlan) -> Iterator[str]:
    """Yield the environment section of a plan's page: whether the module's inequality holds, and up to which
    t. Nothing for a run without an environment or engines that cannot sample.

    s = mean_response / turns x P / (tokens per second of all engines). The mean response includes given
    tokens, as does ``--mean-response-tokens``.
    """
    run = job.run
    share, places = _share(run), engines.count * engines.running
    if not job.samples or not share or not places:
        return
    names = run.data.source_names or ("",)
    most = max(run.environments[name].max_turns for name in names if run.environments[name].function)
    turn_tokens = job.mean_response / (job.options.environment_turns or most)
    turn_seconds = turn_tokens * places / engines.tokens_per_second
    admitted = job.responses * (run.rollout.max_staleness + (not job.overlaps))
    longest = max(0.0, turn_seconds / share * (admitted / (SPARE * places) - 1))
    when = " while the policy trains" if job.overlaps else ""
    yield (
        f"Environment: turns of {turn_seconds:,.3g} s on {places:,.0f} places of engines; {admitted:,} "
        f"responses may be open{when}"
    )
    filled = f"the places stay filled if a step takes {longest:,.3g} s or less in the mean"
    if (seconds := job.options.environment_seconds) is None:
        yield f"  {filled}; give yours by --environment-seconds"
        return
    needed = SPARE * places * (1 + share * seconds / turn_seconds)
    yield f"  steps of {seconds:,.3g} s need {needed:,.0f}; {filled}"
    if needed > admitted:
        yield "  WARNING: engines sample less than that estimate; raise rollout.max_staleness"


def _share(run: RunConfig) -> float:
    """Return the weighted share of training prompts whose source has an environment."""
    if not run.data.sources:
        return float(run.environment.function is not None)
    weights = {source.name: source.weight for source in run.data.sources}
    within = [weight for name, weight in weights.items() if run.environments[name].function is not None]
    return sum(within) / sum(weights.values())
