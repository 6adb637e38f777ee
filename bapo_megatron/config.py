"""The whole run, one frozen object. A recipe returns a RunConfig; the command line overrides its fields.

What one field says about another is checked here, in ``RunConfig.check``; what needs the disk (the
dataset, the model folder) is checked in ``preflight.py``. Both before any process starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_type_hints

from typeguard import TypeCheckError, check_type

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """The policy's starting point."""

    hf_path: Path
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; gradients are summed and masters kept in float32."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over processes."""

    tensor: int = 1
    """Tensor parallel size (TP): splits heads, MLP and vocabulary."""
    pipeline: int = 1
    """Pipeline parallel size (PP): splits the layers into stages."""
    virtual: int = 1
    """Model chunks on each pipeline stage (interleaved schedule); 1 for none."""
    context: int = 1
    """Context parallel size (CP): splits each sequence."""
    data: int | None = None
    """Data parallel size (DP). None: 1, or under a launcher all the processes that are left."""
    sequence: bool = False
    """Sequence parallelism: norms and residuals split over the TP ranks."""
    timeout_minutes: float = 60
    """Longest wait for another rank. The other ranks wait while rank 0 samples, so it must outlast that."""

    @property
    def model_size(self) -> int:
        """Processes that hold one replica of the model."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class DataConfig:
    """The training problems."""

    path: Path
    """JSONL or parquet with the fields of Skywork-OR1-RL-Data."""
    max_prompt_tokens: int = 2048
    """Longer prompts are left out, and counted."""
    shuffle: bool = True
    """A new order each epoch, from the run's seed; else the order of the file."""


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled."""

    prompts_per_step: int = 64
    """Groups that a step trains on."""
    group_size: int = 16  # G
    """Responses for each prompt."""
    temperature: float = 1.0
    """Of sampling, and of the trained distribution."""
    max_response_tokens: int = 8192
    """Responses are cut here, with finish reason `length`."""
    engine: Literal["local"] = "local"
    """`local`: in this process."""
    max_batch: int = 256
    """Requests that the local engine decodes at a time."""
    drop_uniform_groups: bool = True
    """Drop groups whose rewards are all equal (they teach nothing), and sample others."""
    resample_rounds: int = 2
    """Times that dropped groups are replaced in a step; then it trains on what there is."""
    replay: Path | None = None
    """Train on the stored rollouts of this run instead of sampling (to compare layouts or losses)."""


@dataclass(frozen=True)
class RewardConfig:
    """How responses are judged."""

    kind: Literal["math"] = "math"
    """`math`: math-verify compares the final answer with the ground truth."""
    correct: float = 1.0
    """Reward of a right answer."""
    wrong: float = 0.0
    """Reward of a wrong or missing answer."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is optimized."""

    bounds: BoundsConfig = field(default_factory=BoundsConfig)
    """Clipping bounds; presets in `bapo_megatron.algo.bapo`."""
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """`grpo`: (reward - group mean) / group std. `dr_grpo`: reward - group mean."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the update, or first within each response."""
    reuse_epochs: int = 1  # E + 1
    """Passes over each batch."""
    updates_per_epoch: int = 1
    """Optimizer steps in each pass."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule, counted in updates."""

    lr: float = 2e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Where the decay ends."""
    warmup_updates: int = 0
    """Updates of linear warmup from zero."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warmup, over the planned updates of the run."""
    weight_decay: float = 0.01
    """On matrices; norms and biases are spared."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest gradient norm."""


@dataclass(frozen=True)
class BatchConfig:
    """How rollouts become micro-batches."""

    pack_tokens: int = 16384
    """Tokens of a micro-batch; a longer single sequence is refused."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass."""
    logprob_chunk_tokens: int = 4096
    """Tokens whose float32 softmax exists at a time."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept for a continuation."""

    every: int = 10
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = 2
    """Older ones are deleted once a newer one is whole; 0 keeps all."""


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl and updates.jsonl."""

    tensorboard: bool = True
    """Event files in the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project, if given and installed."""


@dataclass(frozen=True)
class RunConfig:
    """One run. See recipes/ for complete ones."""

    name: str
    """Names the run directory, runs/NAME, unless run_dir says otherwise."""
    model: ModelConfig
    data: DataConfig
    steps: int = 100
    """Steps of the run; each samples one batch and makes reuse_epochs x updates_per_epoch updates."""
    seed: int = 0
    """Of shuffling, sampling and the split into updates."""
    run_dir: Path | None = None
    """Run directory; an existing one is continued."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.run_dir or Path("runs") / self.name

    @property
    def planned_updates(self) -> int:
        """Updates of the whole run, the length of the learning-rate schedule."""
        return self.steps * self.algorithm.reuse_epochs * self.algorithm.updates_per_epoch

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    def check(self) -> None:
        """Raise ConfigError with every mistake that the fields show by themselves."""
        _raise(list(_wrong_types(self)) or list(_problems(self)))


@dataclass(frozen=True)
class SftConfig:
    """A supervised warm start: next-token training on solutions, through the same policy."""

    model: ModelConfig
    data: DataConfig
    """Problems whose `extra_info.solution` holds a full response."""
    output: Path
    """HF folder that is written."""
    updates: int = 100
    """Optimizer steps."""
    samples_per_update: int = 64
    """Sequences in each."""
    seed: int = 0
    """Of the order of the samples."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)

    def check(self) -> None:
        """Raise ConfigError with every mistake that the fields show by themselves."""
        _raise(list(_wrong_types(self)) or [*_out_of_range(self), *_parallel_problems(self.parallel)])


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _wrong_types(config: object, prefix: str = "") -> Iterator[str]:
    """Values that a recipe gave and the command line would not have taken."""
    hints = get_type_hints(type(config))
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        value, path = getattr(config, item.name), f"{prefix}{item.name}"
        try:
            check_type(value, hints[item.name])
        except TypeCheckError as error:
            yield f"{path}={value!r}: {error}"
            continue
        if dataclasses.is_dataclass(value):
            yield from _wrong_types(value, f"{path}.")


def _problems(run: RunConfig) -> Iterator[str]:
    yield from _out_of_range(run)
    yield from _parallel_problems(run.parallel)
    yield from _bounds_problems(run.algorithm.bounds)
    if run.longest_sequence > run.batch.pack_tokens:
        yield (
            f"batch.pack_tokens={run.batch.pack_tokens} is smaller than data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {run.longest_sequence}: a full-length sequence would not fit; "
            f"set it to at least {run.longest_sequence}"
        )
    if run.algorithm.updates_per_epoch > run.rollout.prompts_per_step:
        yield (
            f"algorithm.updates_per_epoch={run.algorithm.updates_per_epoch} is more than "
            f"rollout.prompts_per_step={run.rollout.prompts_per_step}: an update needs at least one group"
        )
    if run.optimizer.min_lr > run.optimizer.lr:
        yield f"optimizer.min_lr={run.optimizer.min_lr} is above optimizer.lr={run.optimizer.lr}"


_AT_LEAST: dict[str, float] = {
    "seed": 0,
    "steps": 1,
    "updates": 1,
    "samples_per_update": 1,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual": 1,
    "parallel.context": 1,
    "parallel.data": 1,
    "data.max_prompt_tokens": 1,
    "rollout.prompts_per_step": 1,
    "rollout.group_size": 2,
    "rollout.max_response_tokens": 1,
    "rollout.max_batch": 1,
    "rollout.resample_rounds": 0,
    "algorithm.reuse_epochs": 1,
    "algorithm.updates_per_epoch": 1,
    "optimizer.lr": 0,
    "optimizer.min_lr": 0,
    "optimizer.warmup_updates": 0,
    "optimizer.weight_decay": 0,
    "batch.pack_tokens": 1,
    "batch.logprob_chunk_tokens": 1,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 0,
}
_ABOVE_ZERO = ("rollout.temperature", "optimizer.clip_grad", "optimizer.eps", "parallel.timeout_minutes")
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2")


def _out_of_range(run: RunConfig | SftConfig) -> Iterator[str]:
    for path, value in flat(run).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{path}={value} is not a finite number"
        elif isinstance(value, (int, float)) and path in _AT_LEAST and value < _AT_LEAST[path]:
            yield f"{path}={value} must be at least {_AT_LEAST[path]}"
        elif isinstance(value, (int, float)) and path in _ABOVE_ZERO and value <= 0:
            yield f"{path}={value} must be above 0"
        elif isinstance(value, (int, float)) and path in _BELOW_ONE and not 0 <= value < 1:
            yield f"{path}={value} must be at least 0 and below 1"


def _parallel_problems(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.sequence and parallel.tensor == 1:
        yield "parallel.sequence needs parallel.tensor of at least 2: it splits over the TP ranks"
    if parallel.virtual > 1 and parallel.pipeline == 1:
        yield f"parallel.virtual={parallel.virtual} needs parallel.pipeline of at least 2"


def _bounds_problems(bounds: BoundsConfig) -> Iterator[str]:
    for problem in bounds.problems():
        yield f"algorithm.bounds.{problem}"


def flat(config: object, prefix: str = "") -> dict[str, object]:
    """The leaves of nested dataclasses under dotted names."""
    leaves: dict[str, object] = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, item.name)
        path = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            leaves.update(flat(value, f"{path}."))
        else:
            leaves[path] = value
    return leaves
