"""Plan of a training job: memory of every stage, speed, traffic, engines, and the limits it exceeds.

``make_plan`` is called by ``bapo plan``, ``bapo submit`` and the layout search (``advice.py``).

``engines`` estimates the KV cache of the inference engines, and the sampling time of a step. Decoding is
taken as bound by memory bandwidth: a decode step reads the weights once and the KV cache of every sequence
(Pope et al. 2022, "Efficiently Scaling Transformer Inference", arXiv 2211.05102, section 2). Of a model with
experts it reads those that some sequence takes. Without partial rollout a step's sampling ends with its last
response (lengths by ``lengths.py``); a decode step of few responses reads the weights, too. Scheduling, the
engine's collectives and scoring are left out. Used in ``commands/`` and this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from bapo_megatron.hf.config import ModelShape
from bapo_megatron.planning.hardware import GB, GPUS_PER_NODE
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.lengths import ResponseLengths, busiest_engine_responses, decode_seconds
from bapo_megatron.planning.memory import StageMemory, host_bytes, stage_memory
from bapo_megatron.planning.sizes import read_parameters, rollout_bytes, run_folder_bytes, total_parameters
from bapo_megatron.planning.speed import (
    Handover,
    HostUpdate,
    Speed,
    handover_estimate,
    host_update,
    reference_seconds,
    speed,
)
from bapo_megatron.planning.traffic import Sync, Traffic, sync_traffic, update_traffic
from bapo_megatron.planning.verdict import Verdict, gpu_excess, host_excess
from bapo_megatron.policy.flops import linear_flops_per_token


@dataclass(frozen=True)
class EnginePlan:
    """Estimated memory and speed of the run's inference engines: plain data, made by ``engines``."""

    gpus: int
    count: int
    weights: float
    """Bytes of the weights on each GPU."""
    cache: float
    """Bytes of KV cache on each GPU."""
    cache_per_token: int
    """Bytes of one token's keys and values in all layers, over all TP ranks of an engine."""
    longest_sequences: int
    """Sequences of the longest length that one engine's cache holds."""
    running: float
    """Sequences that one engine decodes at a time, each at the mean length of a running sequence."""
    tokens_per_second: float
    """Estimate of the tokens that all engines sample in a second."""
    step_seconds: float
    """Estimate of the seconds for all responses of a step, at full decode batches: where unfinished responses
    continue in the next step (``max_staleness`` of 1 or more)."""
    rollout_seconds: float
    """Estimate of the seconds until the last response of a step is done, with the prompts' prefill and the
    tail, in which few responses run."""
    prefill_seconds: float
    """Part of ``rollout_seconds`` for the prompts, one prefill for each response: an upper estimate, since
    engines may share a group's prompt."""
    cut_share: float
    """Share of the responses that reach the longest length, by the assumed distribution."""
    longest_seconds: float
    """Estimate of the seconds for one response of the longest length, alone on its engine: a step with such a
    response is not shorter."""

    @property
    def fits(self) -> bool:
        """Whether an engine can hold one sequence of full length."""
        return self.count > 0 and self.longest_sequences >= 1


def cache_bytes_per_token(shape: ModelShape) -> int:
    """Bytes of one token's keys and values in bfloat16, all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * 2


def _default_gpus(job: Job) -> int:
    sglang = job.run.rollout.sglang
    beside = job.run.rollout.engine == "sglang" and not sglang.urls and job.servers_problem is None
    return sglang.servers * sglang.tensor if beside else max(job.gpus, sglang.tensor)


def engines(job: Job) -> EnginePlan:
    """The estimate for ``engine_gpus`` GPUs in engines of ``rollout.sglang.tensor`` GPUs each."""
    options, gpu = job.options, job.gpu
    size = job.run.rollout.sglang.tensor
    gpus = options.engine_gpus or _default_gpus(job)
    weights = total_parameters(job.shape) * 2.0 / size
    cache = max(0.0, job.engine_fraction * gpu.memory - weights)
    per_token = cache_bytes_per_token(job.shape)
    count = gpus // size
    # SGLang cuts the cache by KV heads; with more ranks than heads several ranks hold the same ones.
    split = min(size, job.shape.kv_heads)
    held = cache * split / per_token
    lengths = job.lengths
    present = job.mean_prompt + lengths.running_mean
    share = busiest_engine_responses(job.sampled_responses, count, options.engine_imbalance)
    slots = min(held / present, job.max_in_flight)
    running = min(slots, job.sampled_responses / max(1, count))
    bandwidth = options.engine_bandwidth * gpu.memory_bandwidth
    token_seconds = per_token / split / bandwidth

    def weight_seconds(sequences: float) -> float:
        return read_parameters(job.shape, sequences) * 2.0 / size / bandwidth

    rate = count * running / (weight_seconds(running) + running * present * token_seconds)
    longest = job.run.rollout.max_response_tokens
    prompts = share * job.mean_prompt * linear_flops_per_token(job.shape)
    prefill = prompts / size / (options.mfu * gpu.peak)
    busiest = _busiest(lengths, share, job.sampled_responses, max(1, int(slots)), job.mean_prompt)
    # Experts are read less often in the tail: by as many responses as run in the mean over the steps.
    steps = busiest[0]
    decoding = steps * weight_seconds(share * job.mean_response / steps) + token_seconds * busiest[1]
    return EnginePlan(
        gpus=gpus,
        count=count,
        weights=weights,
        cache=cache,
        cache_per_token=per_token,
        longest_sequences=int(held // job.run.longest_sequence),
        running=running,
        tokens_per_second=rate,
        step_seconds=job.sampled_responses * job.mean_response / rate if rate else float("inf"),
        rollout_seconds=prefill + decoding if rate else float("inf"),
        prefill_seconds=prefill,
        cut_share=lengths.cut_share,
        longest_seconds=longest * (weight_seconds(1) + longest / 2 * token_seconds),
    )


@lru_cache(maxsize=256)
def _busiest(
    lengths: ResponseLengths, share: int, responses: int, slots: int, prompt: float
) -> tuple[float, float]:
    """Decode steps of the busiest engine, and KV entries that it reads. Cached for the layout search."""
    found = lengths.busiest_engine_lengths(share, responses)
    return (
        decode_seconds(found, slots, prompt, step_seconds=1.0, token_seconds=0.0),
        decode_seconds(found, slots, prompt, step_seconds=0.0, token_seconds=1.0),
    )


@dataclass(frozen=True)
class JobPlan:
    """Plan of one job: estimated memory, speed, traffic and engines, as plain data with sums over it.

    Made by ``make_plan``, printed by ``page.py``.
    """

    job: Job
    stages: list[StageMemory]
    speed: Speed
    traffic: list[Traffic]
    sync: Sync
    engines: EnginePlan
    host: float
    """Bytes of host memory that a node needs while it saves."""
    host_update: HostUpdate | None
    """An optimizer step on the host; None if it is on the GPU."""
    handover: Handover | None
    """The GPU hand-overs between training and sampling; None if servers are not colocated."""

    @property
    def train_seconds(self) -> float:
        """Seconds that all updates of a step take, the first without the passes for ratios that it knows, and
        the swaps with a frozen reference."""
        updates = self.job.updates * (self.speed.update_seconds + self.stepping_seconds)
        return updates - self.speed.known_seconds + reference_seconds(self.job)

    @property
    def stepping_seconds(self) -> float:
        """Seconds of an optimizer step on the host; 0 on the GPU, where it is negligible."""
        return self.host_update.seconds if self.host_update else 0.0

    @property
    def sampling_seconds(self) -> float:
        """Sampling time of a step: until its last response is done; with partial rollout at full batches."""
        return self.engines.step_seconds if self.job.partial_rollout else self.engines.rollout_seconds

    @property
    def step_seconds(self) -> float:
        """Estimate of a step with the weight sync: sampling and training take turns, or overlap."""
        changing = self.handover.seconds if self.handover else 0.0
        both = (self.sampling_seconds, self.train_seconds)
        return (max(both) if self.job.overlaps else sum(both)) + self.sync.expected_seconds + changing

    @property
    def trainer_nodes(self) -> int:
        """Nodes that train."""
        return -(-self.job.gpus // GPUS_PER_NODE)

    @property
    def server_nodes(self) -> int:
        """Nodes of rollout servers beside the trainer's; 0 if the servers fit on the trainer's."""
        return -(-self.engines.gpus // GPUS_PER_NODE) if self.job.servers_problem else 0

    @property
    def run_seconds(self) -> float:
        """Estimate of the seconds of all steps of the run."""
        return self.job.run.steps * self.step_seconds

    @property
    def checkpoint_seconds(self) -> float:
        """Estimate of the seconds from one checkpoint to the next, the first included."""
        return min(self.job.run.steps, self.job.run.checkpoint.every) * self.step_seconds

    @property
    def disk(self) -> float:
        """Bytes that the run's folder needs, without rollouts and logs."""
        return run_folder_bytes(self.job.run, self.job.shape)

    @property
    def rollouts(self) -> float:
        """Bytes of the rollouts that the run keeps, routes included, at the assumed lengths."""
        return rollout_bytes(self.job.run, self.job.shape, self.job.mean_response)

    @property
    def cost(self) -> float:
        """GPU-seconds for each token, with no communication hidden; ``bapo plan`` ranks layouts by it."""
        busy = self.speed.update_seconds + self.speed.link_seconds + self.stepping_seconds
        return busy / self.speed.update_seconds / self.speed.tokens_per_second

    @cached_property
    def verdict(self) -> Verdict:
        """Limits that the job exceeds."""
        return Verdict(tuple(self._misfits()), tuple(filter(None, [self._engine_problem()])))

    def _misfits(self) -> Iterator[str]:
        for memory in self.stages:
            beside = f", {memory.kept / GB:.1f} of them a server's" if memory.kept else ""
            server = (memory.kept + memory.reading) / GB
            read = f"while servers read the weights, {server:.1f} of them a server's"
            phases = {
                f"in an update{beside}": memory.training + memory.kept,
                f"while saving{beside}": memory.saving + memory.kept,
                f"while syncing weights{beside}": memory.syncing + memory.kept,
                read: memory.handover,
                f"while engines sample, {memory.resting / GB:.1f} of them the policy's": memory.sampling,
            }
            for phase, used in phases.items():
                yield from gpu_excess(self.job, f"stage {memory.stage}", used, phase)
        yield from host_excess(self.job, self.host, " while saving")

    def _engine_problem(self) -> str | None:
        """Problem of engines whose KV cache is too small for the longest sequence, with the fix; or None."""
        if self.engines.fits:
            return None
        if not self.engines.count:
            return "there are fewer --engine-gpus than rollout.sglang.tensor"
        fix = "rollout.sglang.tensor or memory_fraction" if self.job.colocated else "rollout.sglang.tensor"
        return (
            f"an engine's KV cache holds no sequence of {self.job.run.longest_sequence} tokens: raise {fix}"
        )


def make_plan(job: Job) -> JobPlan:
    """The plan of ``job``. Arithmetic only: no GPU, no weights, no processes."""
    return JobPlan(
        job=job,
        stages=[stage_memory(job, stage) for stage in range(job.parallel.pipeline)],
        speed=speed(job),
        traffic=update_traffic(job),
        sync=sync_traffic(job),
        engines=engines(job),
        host=host_bytes(job),
        host_update=host_update(job),
        handover=handover_estimate(job),
    )
