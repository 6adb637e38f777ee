"""Planned job, ``Job``: a recipe, its model's shape, a GPU type and assumptions; sizes are its properties.

For `bapo plan`, `rehearse`, `submit` and `doctor`. ``GPUS`` has the GPU types; ``find_shape`` reads the
model's config.json and raises ConfigError without one.
The pipeline schedules of ``in_flight`` and ``slots`` follow Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.2, with the warm-up
counts of megatron-core's ``schedules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Gt, Le, Lt

from bapo_megatron.algo.bounds import sum_count
from bapo_megatron.algo.registered_losses import searches_update
from bapo_megatron.algo.settings import out_of_range
from bapo_megatron.config import ParallelConfig, RunConfig
from bapo_megatron.config.validation import raise_problems
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.layers.costs import Place, Spec
from bapo_megatron.planning.lengths import ResponseLengths, response_lengths
from bapo_megatron.planning.sizes import (
    evaluation_bytes,
    measured_imbalance,
    rollout_bytes,
    run_folder_bytes,
)
from bapo_megatron.rollout.engines.sglang.requirements import placement_problem

GB = 1e9
GPUS_PER_NODE = 8
_BYTES = {"bfloat16": 2, "float32": 4}
# Competition mathematics prompts have 100 to 300 tokens; a limit of 2048 allows for rare long ones.
_MEAN_PROMPT = 1 / 8
_MEAN_RESPONSE = 1 / 4


@dataclass(frozen=True)
class Gpu:
    """GPU type: rates and memory of the GPU and its node, in bytes, bytes/s and FLOP/s."""

    name: GpuName
    memory: float
    """Data sheet bytes (decimal gigabytes); the driver's additional 3 to 7 % are a reserve."""
    peak: float
    """Dense bfloat16 rate."""
    memory_bandwidth: float
    nvlink: float
    """NVLink within the node, one direction, per GPU."""
    network: float
    """Network between nodes, one direction, per GPU."""
    host_memory: float
    """Host memory of a DGX node with eight such GPUs."""
    host_bandwidth: float
    """Its bandwidth, both sockets."""
    pcie: float
    """PCIe between a GPU and the host, one direction."""


GpuName = Literal["a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb"]
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80gb", 80 * GB, 312e12, 2039 * GB, 300 * GB, 25 * GB, 2000 * GB, 409 * GB, 32 * GB),
        Gpu("h100-80gb", 80 * GB, 989e12, 3350 * GB, 450 * GB, 50 * GB, 2000 * GB, 614 * GB, 64 * GB),
        Gpu("h200-141gb", 141 * GB, 989e12, 4800 * GB, 450 * GB, 50 * GB, 2000 * GB, 614 * GB, 64 * GB),
        Gpu("b200-180gb", 180 * GB, 2250e12, 8000 * GB, 900 * GB, 50 * GB, 2000 * GB, 717 * GB, 64 * GB),
    )
}
"""Sources (NVIDIA data sheets, dense rates without sparsity): "A100 Tensor Core GPU" and DGX A100 (2021),
"H100 Tensor Core GPU" and DGX H100 (2023), "H200 Tensor Core GPU" (2024), "HGX B200" and DGX B200 (2024).
The data sheets give NVLink's rate for both directions together; here it is that of one. The network is one
InfiniBand port for each GPU: 200 Gb/s beside an A100, 400 Gb/s beside the others. PCIe is generation 4
beside an A100, 5 beside the others. Host memory has two sockets of eight channels: DDR4-3200 in a DGX A100,
DDR5-4800 in a DGX H100 and H200, DDR5-5600 in a DGX B200."""


@dataclass(frozen=True)
class GpuOptions:
    """Flags of ``bapo plan`` and ``rehearse`` for a run's GPUs: type, usable memory, expert imbalance."""

    gpu: GpuName = "h100-80gb"
    """Type of the GPUs that train and sample; eight make a node."""
    memory_fraction: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of a GPU's and of a node's memory that a plan may use."""
    expert_imbalance: Annotated[float, Ge(1)] = 1.2
    """Copies of tokens that the busiest rank of EP gets, as a multiple of the mean, for models with experts.
    The default is assumed."""
    expert_routes: Path | None = None
    """File of a step's routes (`RUN/journal/step_000001.routes.npy`), from which that multiple is measured
    for the layout's EP, in place of expert_imbalance."""

    def check(self) -> None:
        """Raise ConfigError for a value out of its range."""
        raise_problems(list(out_of_range(self)))


@dataclass(frozen=True)
class PlanOptions(GpuOptions):
    """Flags of ``bapo plan`` besides the recipe's: the machines, and the assumptions of its estimates (MFU,
    response lengths, engines, environments)."""

    mfu: Annotated[float, Gt(0), Le(1)] = 0.3
    """Model FLOPs utilization in matrix products, with the communication and the gaps between packs of a real
    run. Recomputation and the pipeline bubble come on top."""
    attention_mfu: Annotated[float, Gt(0), Le(1)] = 0.5
    """The same in attention. Long sequences reach more, since more of a pass is in its kernels."""
    mean_response_tokens: Annotated[int | None, Ge(1)] = None
    """Mean length of a response. None: a quarter of the longest."""
    length_spread: Annotated[float, Gt(0)] = 1.5
    """Standard deviation of the logarithm of the responses' lengths: 1.5 cuts 8 % of them where the mean is a
    quarter of the longest, 1.0 4 %."""
    engine_gpus: Annotated[int | None, Ge(1)] = None
    """GPUs that run engines. None: those of the recipe's servers where they have room on its first node, else
    as many as train."""
    engine_memory_fraction: Annotated[float | None, Gt(0), Le(1)] = None
    """Share of a GPU's memory for an engine's weights and KV cache. None: rollout.sglang.memory_fraction."""
    engine_bandwidth: Annotated[float, Gt(0), Le(1)] = 0.6
    """Share of the memory bandwidth that decoding reaches."""
    engine_imbalance: Annotated[float, Ge(1)] = 1.0
    """Responses of the busiest engine, as a multiple of the mean. 1: the sampler's own choice, the least
    loaded engine; more behind a router that deals by prefix."""
    dropped_groups: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the sampled groups that rollout.drop_uniform_groups drops and replaces by others; a run's own
    is `rollout/groups_dropped` over `rollout/groups_sampled`."""
    environment_seconds: Annotated[float | None, Ge(0)] = None
    """Mean seconds of a step of the environment, such as a tool's call. None: the plan says how long steps
    may take before engines run empty."""
    environment_turns: Annotated[float | None, Ge(1)] = None
    """Mean turns of a response in an environment. None: the most, `environment.max_turns`."""
    compare: Annotated[int, Ge(0)] = 0
    """List this many of the fastest layouts that fit on as many GPUs."""
    as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
    """Print everything as one JSON object."""


def find_shape(recipe: Path, hf_path: Path) -> ModelShape:
    """Return the model's shape, from the config.json in ``shape_folder``. Raises ConfigError without one."""
    return read_model_shape(shape_folder(recipe, hf_path))


_RECIPES = Path(__file__).parents[2] / "recipes"


def shape_folder(recipe: Path, hf_path: Path) -> Path:
    """Return the folder with the model's config.json: its own, or ``shapes/NAME`` beside the recipe, beside
    the recipe's folder, or in recipes/ of this checkout. Raises ConfigError if none has one."""
    places = (recipe.parent, recipe.absolute().parent.parent, _RECIPES)
    folders = [hf_path, *(place / "shapes" / hf_path.name for place in places)]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"model.hf_path={hf_path} has no config.json, and {folders[1]} has none either: "
        f"put the model's config.json into one of them (this needs no weights)"
    )


@dataclass(frozen=True)
class Job:
    """Planned job, the input of every estimate: recipe (``run``), model shape, and ``options`` with GPU type
    and assumptions. Its properties are sizes derived from these."""

    run: RunConfig
    shape: ModelShape
    options: PlanOptions

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.options.gpu]

    @property
    def budget(self) -> float:
        """GPU memory that the run may use, bytes."""
        return self.options.memory_fraction * self.gpu.memory

    @property
    def host_budget(self) -> float:
        """Host memory of a node that the run may use, bytes."""
        return self.options.memory_fraction * self.gpu.host_memory

    @property
    def parallel(self) -> ParallelConfig:
        return self.run.parallel

    @property
    def replicas(self) -> int:
        return self.parallel.data or 1

    @property
    def gpus(self) -> int:
        """Number of training GPUs."""
        return self.parallel.model_size * self.replicas

    @property
    def samples(self) -> bool:
        """Whether the run has engines; one of stored rollouts (``rollout.replay``) has none."""
        return self.run.rollout.replay is None

    @property
    def servers_problem(self) -> str | None:
        """Problem of placing the run's servers on its first node, as `bapo train` reports it; None if they
        fit, already run, or do not exist."""
        if self.run.rollout.engine != "sglang" or not self.samples:
            return None
        return placement_problem(self.run.rollout, GPUS_PER_NODE, self.gpus)

    @property
    def colocated(self) -> bool:
        """Whether the run's servers and the policy take turns on the same GPUs."""
        return self.samples and self.run.rollout.engine == "sglang" and self.run.rollout.sglang.colocated

    @property
    def offloads(self) -> bool:
        """Whether the policy is in host memory while engines sample."""
        return self.colocated and self.parallel.offload

    @property
    def weights_by_ipc(self) -> bool:
        """Whether colocated servers read the weights from the policy's GPU memory (``sync=ipc``)."""
        return self.colocated and self.run.rollout.sglang.sync == "ipc"

    @property
    def engine_fraction(self) -> float:
        """Share of a GPU's memory for an engine's weights and KV cache."""
        return self.options.engine_memory_fraction or self.run.rollout.sglang.memory_fraction

    def has_servers(self, stage: int) -> bool:
        """Whether pipeline stage ``stage`` has a GPU with a colocated server; those are on rank 0's node,
        where GPU i is rank i."""
        sglang, per_stage = self.run.rollout.sglang, self.gpus // self.parallel.pipeline
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        servers = range(sglang.first_gpu, sglang.first_gpu + sglang.servers * sglang.tensor)
        return self.colocated and max(ranks.start, servers.start) < min(ranks.stop, servers.stop)

    @property
    def gpus_on_node(self) -> int:
        """Number of a node's GPUs in this job."""
        return min(GPUS_PER_NODE, self.gpus)

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share a model shard's optimizer state: DP x CP; for experts, ``expert_shards``."""
        return self.replicas * self.parallel.context

    @property
    def expert_shards(self) -> int:
        """Ranks that share the optimizer state of a rank's experts: TP x CP x DP / (EP x ETP)."""
        p = self.parallel
        return max(1, p.tensor * self.optimizer_shards // (p.expert * p.expert_tensor))

    def place(self, spec: Spec = "te", passes: float = 0.0) -> Place:
        """Return the busiest rank, for layer costs, with ``passes`` forward-only passes per update."""
        busiest, recompute = self.expert_imbalance, self.run.batch.recompute
        return Place(self.shape.hidden, self.parallel, self.element, spec, recompute, busiest, passes)

    @property
    def expert_imbalance(self) -> float:
        """Copies of tokens on the busiest EP rank over the mean: assumed, or measured from routes; 1 for EP
        1, at most EP, when it gets all."""
        if self.options.expert_routes is None or self.shape.experts is None:
            return min(self.options.expert_imbalance, self.parallel.expert)
        return measured_imbalance(self.options.expert_routes, self.shape, self.parallel.expert)

    @property
    def host_optimizer(self) -> bool:
        return self.run.optimizer.device == "cpu"

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation."""
        return _BYTES[self.run.model.dtype]

    @property
    def tokens(self) -> float:
        """Tokens of a pack on one CP rank."""
        return self.run.batch.pack_tokens / self.parallel.context

    @property
    def mean_response(self) -> float:
        longest = self.run.rollout.max_response_tokens
        return min(longest, self.options.mean_response_tokens or max(1, longest * _MEAN_RESPONSE))

    @property
    def disk(self) -> float:
        """Upper bound of the run directory's bytes without rollouts and logs."""
        return run_folder_bytes(self.run, self.shape)

    @property
    def rollouts(self) -> float:
        """Bytes of kept rollouts and held-out responses at the assumed mean length."""
        of_training = rollout_bytes(self.run, self.shape, self.mean_response)
        return of_training + evaluation_bytes(self.run, self.mean_response)

    @property
    def lengths(self) -> ResponseLengths:
        longest = self.run.rollout.max_response_tokens
        return response_lengths(self.mean_response, self.options.length_spread, longest)

    @property
    def max_in_flight(self) -> int:
        """Limit of concurrent requests per engine."""
        rollout = self.run.rollout
        return rollout.sglang.max_in_flight if rollout.engine == "sglang" else rollout.max_batch

    @property
    def partial_rollout(self) -> bool:
        """Whether unfinished responses continue in the next step (partial rollout)."""
        return self.run.rollout.max_staleness > 0

    @property
    def overlaps(self) -> bool:
        """Whether engines sample while the policy trains."""
        return self.partial_rollout and self.run.rollout.overlap and not self.colocated

    @property
    def mean_prompt(self) -> float:
        return max(1.0, self.run.data.max_prompt_tokens * _MEAN_PROMPT)

    @property
    def responses(self) -> int:
        """Responses per step: prompts x group size."""
        return self.run.rollout.prompts_per_step * self.run.rollout.group_size

    @property
    def sampled_responses(self) -> int:
        """Responses sampled per step: ``responses`` / (1 - share of dropped groups), at most
        ``max_oversampling`` times ``responses``."""
        times = 1 / (1 - self.options.dropped_groups)
        return round(self.responses * min(times, self.run.rollout.max_oversampling))

    @property
    def updates(self) -> int:
        """Updates per step: reuse epochs x updates in each."""
        return self.run.algorithm.reuse_epochs * self.run.algorithm.updates_per_epoch

    @property
    def tokens_per_update(self) -> float:
        """Tokens per update, prompts included."""
        tokens = self.responses * (self.mean_prompt + self.mean_response)
        return tokens / self.run.algorithm.updates_per_epoch

    @property
    def holds_forwards(self) -> bool:
        """Whether an update's search keeps the activations of all packs (``batch.hold_forwards``)."""
        return self.run.batch.hold_forwards and searches_update(self.run.algorithm)

    @property
    def responses_per_search(self) -> float | None:
        """Mean responses per search of the clipping bounds; None without a search."""
        algorithm, bounds = self.run.algorithm, self.run.algorithm.bounds
        if algorithm.loss != "clip" or sum_count(bounds) == 2:
            return None
        most = self.responses / algorithm.updates_per_epoch
        if bounds.bounds_tokens and bounds.grouped:
            return min(most, max(1.0, bounds.bounds_tokens / self.mean_response))
        if bounds.scope == "micro_batch":
            packed = self.run.batch.pack_tokens * self.replicas / (self.mean_prompt + self.mean_response)
            return min(most, max(1.0, packed))
        return most

    @property
    def micro_batches(self) -> int:
        """Packs per replica and update; the interleaved schedule needs a multiple of PP."""
        multiple = self.parallel.pipeline if self.parallel.virtual > 1 else 1
        per_pack = self.run.batch.pack_tokens * self.replicas * multiple
        return multiple * max(1, -int(-self.tokens_per_update // per_pack))

    @property
    def packs_fill(self) -> float:
        """Tokens per update over the capacity of one pack per replica; below 1 replicas idle."""
        return self.tokens_per_update / (self.run.batch.pack_tokens * self.replicas)

    @property
    def filled_packs(self) -> float:
        """Packs that the busiest replica computes per update: its share of the tokens, at least one, which
        one response may fill. The interleaved schedule computes all ``micro_batches``, dummies included."""
        return self.micro_batches if self.parallel.virtual > 1 else max(1.0, self.packs_fill)

    @property
    def typical_length(self) -> float:
        """Token-weighted mean sequence length, E[n^2] / E[n] over prompts of the mean length and ``lengths``.
        A token's attention costs as much as its sequence is long, and most tokens are in long sequences."""
        prompt, response = self.mean_prompt, self.mean_response
        squares = prompt**2 + 2 * response * (prompt + self.lengths.running_mean)
        return squares / (prompt + response)


def in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Return the largest number of forward passes in flight on ``stage``, each of one model chunk.

    1F1B: the warm-up's PP - stage - 1 plus the running one. Interleaved: the warm-up has 2 (PP - stage - 1) +
    (virtual - 1) PP chunks, each 1 / virtual of the stage's layers.
    """
    behind = parallel.pipeline - stage - 1
    chunks = 2 * behind + (parallel.virtual - 1) * parallel.pipeline
    warm_up = chunks if parallel.virtual > 1 else behind
    return min(warm_up + 1, micro_batches * parallel.virtual)


def slots(parallel: ParallelConfig, micro_batches: float) -> float:
    """Return a pipeline pass's duration, M + (PP - 1) / virtual, in units of a stage's time per micro-batch.
    M micro-batches; every other stage adds one chunk while the pipeline fills and drains."""
    return micro_batches + (parallel.pipeline - 1) / parallel.virtual
