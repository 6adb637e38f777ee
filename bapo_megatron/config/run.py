"""The whole run, one frozen object. A recipe returns a RunConfig; the command line overrides its fields.

What one field says about another is checked by ``RunConfig.check``; what needs the disk (the dataset, the
model folder) is checked in ``preflight.py``. Both before any process starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import AvoidSubcommands

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.config.engine import EngineConfig
from bapo_megatron.config.outputs import CheckpointConfig as CheckpointConfig
from bapo_megatron.config.outputs import EvaluationConfig as EvaluationConfig
from bapo_megatron.config.outputs import LoggingConfig as LoggingConfig
from bapo_megatron.config.sglang import SglangConfig as SglangConfig
from bapo_megatron.config.validation import raise_problems, run_problems, sft_problems, wrong_types


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
    """Longest wait for another rank in a collective. While rank 0 waits for samples the ranks meet every few
    seconds: that does not count."""

    @property
    def model_size(self) -> int:
        """Processes that hold one replica of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def document_multiple(self) -> int:
        """What the length of a document in a pack must be divisible by: two chunks for each CP rank."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def length_multiple(self) -> int:
        """What the length of a pack must be divisible by: its documents, and the parts of its ranks."""
        return math.lcm(self.document_multiple, self.context * (self.tensor if self.sequence else 1))

    def pack_tokens_for(self, positions: int) -> int:
        """The smallest ``batch.pack_tokens`` that holds a sequence of so many positions."""
        return -(-positions // self.length_multiple) * self.length_multiple


@dataclass(frozen=True)
class DataConfig:
    """The training problems."""

    path: Path
    """JSONL or parquet with the fields of Skywork-OR1-RL-Data."""
    max_prompt_tokens: int = 2048
    """Longer prompts are left out, and counted."""
    difficulty: str | None = None
    """Where in `extra_info` a problem's difficulty is, e.g. `model_difficulty.DeepSeek-R1-Distill-Qwen-7B`.
    Prompts outside the bounds, and those without the number, are left out and counted."""
    min_difficulty: float = -1e9
    """Smallest difficulty that is kept."""
    max_difficulty: float = 1e9
    """Largest difficulty that is kept."""
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
    engine: str = "local"
    """`local`: in the sampler's process. `sglang`: servers, see `sglang`. Or `package.module:Name` of a
    subclass of `bapo_megatron.rollout.engines.backend.EngineBackend`, see `custom_engine`."""
    max_batch: int = 256
    """Requests that the local engine decodes at a time."""
    drop_uniform_groups: bool = True
    """Drop groups whose rewards are all equal (they teach nothing), and sample others."""
    max_oversampling: float = 3.0
    """Most groups sampled for a step, as a multiple of prompts_per_step, while dropped ones are replaced;
    then it trains on what there is."""
    max_staleness: int = 0
    """Steps that the weights of a group's oldest token may lie behind those that its step starts from. 0:
    every step samples anew and training waits. 1 and more: servers go on sampling while the policy trains."""
    overlap: bool = True
    """With max_staleness of 1 or more: sample during training too. Off, sampling stops when a step has its
    groups, and what is unfinished goes on in the next one (engines that share their GPUs need that)."""
    segment_tokens: int | None = None
    """Most tokens of one request; longer responses go on from their prefix. None: the whole response. A
    segment is what is lost with an engine."""
    budget_tokens: int | None = None
    """Partial rollout: most tokens that a response gets from one step's weights; what is unfinished waits for
    the next step's. Needs max_staleness of 1 or more. None: no limit."""
    on_stale: Literal["resample", "drop", "train"] = "resample"
    """A group older than max_staleness: its prompt is sampled anew, or it is dropped, or trained on."""
    keep_steps: int | None = 1000
    """Steps whose rollouts are kept, 12 bytes a token; those since the oldest checkpoint always are. Only a
    run that keeps all of them can be replayed from its beginning. None: all."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    """The servers of `engine=sglang`."""
    custom_engine: AvoidSubcommands[EngineConfig | None] = None
    """Settings of `engine=package.module:Name`: an `EngineConfig`, or a subclass that adds fields. A recipe
    gives it; then its fields are flags. None: the defaults."""
    replay: Path | None = None
    """Train on the stored rollouts of this run instead of sampling (to compare layouts or losses)."""

    @property
    def engine_config(self) -> EngineConfig:
        """Settings of the chosen engine: the field of its name, or `custom_engine`, or the defaults."""
        chosen = self.custom_engine if ":" in self.engine else getattr(self, self.engine, None)
        return chosen if isinstance(chosen, EngineConfig) else EngineConfig()


@dataclass(frozen=True)
class RewardConfig:
    """How responses are judged."""

    function: str = "math"
    """`math`: math-verify compares the last box with the ground truth. `code`: the last code block must pass
    the problem's tests. `math_or_code`: by the form of each ground truth. Or `package.module:function` of a
    `def score(prompt: Prompt, response: str) -> float`."""
    correct: float = 1.0
    """Reward of a right answer (built-in functions)."""
    wrong: float = 0.0
    """Reward of a wrong or missing answer (built-in functions)."""
    failed: float = 0.0
    """Reward of a response whose judgement raised, hung, died or was no finite number; no penalties."""
    workers: int = 2
    """Processes that judge, on rank 0's machine."""
    time_limit_s: float = 30.0
    """Longest judgement of a response; then its worker is replaced."""
    memory_limit_mb: int = 4096
    """What a judgement may take beside the memory of an idle worker; and each process of tested code."""
    code_case_limit_s: float = 6.0
    """Longest run of one test of a program; all tests of a response have 0.9 `time_limit_s`."""
    format_pattern: str | None = None
    """Regular expression that the whole response must match; `.` matches newlines."""
    format_penalty: float = 0.0
    """Taken off the reward of a response that does not match it."""
    overlong_tokens: int = 0
    """Width of the zone before `rollout.max_response_tokens` where length begins to cost."""
    overlong_penalty: float = 0.0
    """Taken off a response of full length; falls linearly to 0 where the zone begins (DAPO, Eq. 13)."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is optimized."""

    loss: str = "bapo"
    """The loss of an update. `bapo`: the clipped surrogate of PPO at `bounds`, searched or fixed (GRPO,
    clip-higher). Or `package.module:Name` of a subclass of `bapo_megatron.algo.losses.Loss`."""
    bounds: BoundsConfig = field(default_factory=BoundsConfig)
    """Clipping bounds; presets in `bapo_megatron.algo.bapo`. Another loss reads fixed ones or none."""
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """`grpo`: (reward - group mean) / group std. `dr_grpo`: reward - group mean."""
    polarity: PapoConfig = field(default_factory=PapoConfig)
    """Advantages reweighted by the token's effect on the entropy (PAPO); off by default."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the update, or first within each response."""
    known_ratio: bool = True
    """In an update whose every token the present weights sampled, the search for the bounds takes the ratio
    to be 1 and needs no forward pass. What engine and trainer differ by shows as `bapo/clip_..._distance`.
    With `old_log_probs=trainer` the ratio is 1 in the first update of each step."""
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """Denominator of the ratio, in all updates of a step. `rollout`: what the engine reported. `trainer`:
    what the trainer says before the first of them, one forward pass more in each step (PPO's pi_old)."""
    importance_cap: float | None = None
    """With `old_log_probs=trainer`: a token's weight is multiplied by min(pi_old / pi_rollout, cap). 2 is
    usual; None for no such weight."""
    gap_mean_limit: float | None = 0.05
    """Alarm when the log-probs of engine and trainer, at the same weights, differ by more on average, in nats
    (`rollout/engine_gap_mean`). None for no alarm."""
    gap_max_limit: float | None = None
    """The same for the token where they differ most (`rollout/engine_gap_max`)."""
    on_gap: Literal["warn", "stop"] = "warn"
    """What the alarm does: a line and an event, or the end of the run."""
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
    hold_forwards: bool = False
    """Run every forward pass of an update before the first backward pass: the exact bounds need no pass of
    their own. Holds the activations of all packs; for full recomputation, without a pipeline."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at a time."""


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
    allow_change: tuple[str, ...] = ()
    """Fields, such as optimizer.lr, that may differ from those that the existing run was started with."""
    hang_minutes: float = 60.0
    """A process that makes no update for so long, and does not wait for rollouts, prints all its stacks and
    ends. 0: never."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
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

    def evaluates(self, step: int) -> bool:
        """Whether the weights that ``step`` has made are asked held-out problems."""
        every = self.evaluation.every
        return every > 0 and step % every == 0 and self.rollout.replay is None

    @property
    def evaluation_sampling(self) -> tuple[float, int]:
        """Temperature and most response tokens of evaluations."""
        own, rollout = self.evaluation, self.rollout
        temperature = rollout.temperature if own.temperature is None else own.temperature
        return temperature, own.max_response_tokens or rollout.max_response_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt and response that engines are asked for, evaluations included."""
        evaluated = self.evaluation_sampling[1] if self.evaluation.every else 0
        return self.data.max_prompt_tokens + max(self.rollout.max_response_tokens, evaluated)

    def check(self) -> None:
        """Raise ConfigError with every mistake that the fields show by themselves."""
        raise_problems(list(wrong_types(self)) or list(run_problems(self)))


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
        raise_problems(list(wrong_types(self)) or list(sft_problems(self)))
