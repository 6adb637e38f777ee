"""Configuration sections: model, parallel layout, data, rollouts, reward, algorithm, optimizer, batch.

Frozen dataclasses, each a field of ``RunConfig``. The docstring of a field is its text in ``--help``;
``Annotated[int, Ge(1)]`` states its range, which ``RunConfig.check`` enforces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt
from tyro.conf import AvoidSubcommands

from bapo_megatron.algo.bounds import BoundsConfig, paper
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.algo.reference_kl_config import DistillationConfig, ReferenceKlConfig
from bapo_megatron.config.engines import EngineConfig, SglangConfig
from bapo_megatron.config.flags import Settings
from bapo_megatron.config.parts import Parts
from bapo_megatron.config.sources import SourceConfig, Sources


@dataclass(frozen=True)
class ModelConfig:
    """The initial model: its Hugging Face folder and precision."""

    hf_path: Path
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of weights and activations. Gradients are reduced, and master weights kept, in float32."""


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel layout: degrees of parallelism, timeout of collectives, and offload to the host."""

    tensor: Annotated[int, Ge(1)] = 1
    """Tensor parallel size (TP): splits heads, MLP and vocabulary."""
    pipeline: Annotated[int, Ge(1)] = 1
    """Pipeline parallel size (PP): splits the layers into stages."""
    virtual: Annotated[int, Ge(1)] = 1
    """Model chunks on each pipeline stage (interleaved schedule); 1: none."""
    pipeline_layers: tuple[int, ...] = ()
    """Layers of each model chunk in the model's order, PP x virtual numbers: the first is stage 0's, the next
    stage 1's. (): equal numbers, one less on the last chunk and on the first ones where they do not divide.
    """
    context: Annotated[int, Ge(1)] = 1
    """Context parallel size (CP): splits each sequence."""
    data: Annotated[int | None, Ge(1)] = None
    """Data parallel size (DP). None: 1, or under a launcher all processes that are left."""
    expert: Annotated[int, Ge(1)] = 1
    """Expert parallel size (EP): splits the experts of a layer over ranks of TP, CP and DP."""
    expert_tensor: Annotated[int, Ge(1)] = 1
    """Tensor parallel size of the experts (ETP): splits each expert's MLP."""
    sequence: bool = False
    """Sequence parallelism: norms and residuals split over the TP ranks."""
    timeout_minutes: Annotated[float, Gt(0)] = 60
    """Longest wait for another rank in a collective; waiting for samples does not count."""

    offload: bool = False
    """For colocated servers: while engines sample, the policy's weights and optimizer state are in host
    memory, and it has no gradients."""

    @property
    def model_size(self) -> int:
        """Ranks of one model replica: TP x PP x CP."""
        return self.tensor * self.pipeline * self.context

    @property
    def document_multiple(self) -> int:
        """Length divisor of a sequence in a pack: two chunks for each CP rank."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def length_multiple(self) -> int:
        """Length divisor of a pack: its sequences split evenly, and so do the parts of its ranks."""
        return math.lcm(self.document_multiple, self.context * (self.tensor if self.sequence else 1))

    def pack_tokens_for(self, positions: int) -> int:
        """Return the smallest ``batch.pack_tokens`` that fits a sequence of ``positions`` tokens."""
        return -(-positions // self.length_multiple) * self.length_multiple


@dataclass(frozen=True)
class DataConfig:
    """Training prompts: a file (`path`) or several (`sources`), length limit, difficulty range, order."""

    path: Path | None = None
    """JSONL or parquet with the fields of Skywork-OR1-RL-Data. None: `sources` names several."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 2048
    """Longest prompt, in tokens; longer ones are left out, and counted."""
    difficulty: str | None = None
    """Where in `extra_info` a problem's difficulty is, e.g. `model_difficulty.DeepSeek-R1-Distill-Qwen-7B`.
    Prompts outside the bounds, or without the number, are left out and counted."""
    min_difficulty: float = -1e9
    """Smallest difficulty that is kept."""
    max_difficulty: float = 1e9
    """Largest difficulty that is kept."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, from the run's seed; else the order of the file."""
    sources: Sources = field(default=(), kw_only=True)
    """Several sources instead of `path`, each with `path`, `weight` (1), `reward` (`reward.function`) and
    `environment` (the run's section): docs/data.md#several-sources-in-one-run. As a flag a JSON list, which
    replaces the recipe's: `[{"path": "data/math", "weight": 2}, {"path": "data/mine.jsonl"}]`."""

    @property
    def files(self) -> tuple[SourceConfig, ...]:
        """The sources; `path` counts as one."""
        return self.sources or ((SourceConfig(self.path),) if self.path is not None else ())

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources in metrics; none for `path`."""
        return tuple(source.name for source in self.sources)


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of responses: prompts per step, group size, length, temperature, staleness, engine, replay."""

    prompts_per_step: Annotated[int, Ge(1)] = 64
    """Prompts of a step, each with one group of responses."""
    group_size: Annotated[int, Ge(2)] = 16  # G
    """Responses to each prompt (GRPO's G)."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Sampling temperature, also of the policy's log-probs."""
    max_response_tokens: Annotated[int, Ge(1)] = 8192
    """Longest response, in tokens; longer ones are cut, with finish reason `length`."""
    engine: str = "local"
    """`local`: in the sampler's process. `sglang`: servers, see `sglang`. Or `package.module:Name` of a
    subclass of `bapo_megatron.rollout.engines.backend.EngineBackend`."""
    max_batch: Annotated[int, Ge(1)] = 256
    """Requests that the local engine decodes at the same time."""
    drop_uniform_groups: bool = True
    """Dynamic sampling (DAPO): drop groups of equal rewards, which have no gradient, and sample others."""
    max_oversampling: Annotated[float, Ge(1)] = 3.0
    """Most groups sampled for a step, as a multiple of prompts_per_step; then it trains on what there is."""
    max_staleness: Annotated[int, Ge(0)] = 0
    """Largest staleness of a group, in training steps: from the weights that sampled its oldest token to
    those at the start of its step. 0: synchronous, training waits while each step samples. 1 or more: engines
    sample while the policy trains."""
    overlap: bool = True
    """With max_staleness of 1 or more: sample while the policy trains. Off: sampling pauses when a step has
    its groups, and unfinished responses continue in the next one."""
    segment_tokens: Annotated[int | None, Ge(1)] = None
    """Most tokens of one request to an engine, so the most that a lost engine can cost a response. None: one
    request for each response."""
    budget_tokens: Annotated[int | None, Ge(1)] = None
    """Partial rollout: most tokens of a response from the weights of one step; it continues with the next
    weights. Needs max_staleness of 1 or more. None: no limit."""
    on_stale: Literal["resample", "drop", "train"] = "resample"
    """A group older than max_staleness: sample its prompt again, drop it, or train on it."""
    keep_steps: Annotated[int | None, Ge(0)] = 1000
    """Newest steps whose rollouts and held-out responses are kept on disk, 12 bytes a token (16 with a
    teacher), at least those since the oldest checkpoint. None: all, which a replay from the beginning needs.
    """
    sglang: SglangConfig = field(default_factory=SglangConfig)
    """The servers of `engine=sglang`."""
    custom_engine: AvoidSubcommands[EngineConfig | None] = field(default=None, kw_only=True)
    """Settings of `engine=package.module:Name`: an `EngineConfig`, or a subclass that adds fields, which
    become flags. None: the defaults."""
    replay: Path | None = None
    """Train on the stored rollouts of this run instead of sampling."""
    route_replay: Literal["off", "measure", "replay"] = field(default="off", kw_only=True)
    """Routes, for models with experts: which experts a token took when it was sampled. `replay`: the trainer
    sends each token to the same ones. `measure`: only their difference is measured. `off`: not asked for.
    They take layers x experts of a token bytes for each token."""

    @property
    def engine_config(self) -> EngineConfig:
        """Settings of the chosen engine: the field of its name, or `custom_engine`, or the defaults."""
        chosen = self.custom_engine if ":" in self.engine else getattr(self, self.engine, None)
        return chosen if isinstance(chosen, EngineConfig) else EngineConfig()

    def without_trainer(self) -> RolloutConfig:
        """Return these settings for a run without a trainer: engines with their own GPUs."""
        name = "custom_engine" if ":" in self.engine else self.engine
        if not isinstance(getattr(self, name, None), EngineConfig):
            return self
        engine: dict[str, Any] = {name: self.engine_config.without_trainer()}
        return replace(self, **engine)


@dataclass(frozen=True)
class RewardConfig:
    """The reward: its function, treatment of failures, worker processes, limits, sandbox, penalties."""

    function: str = "math"
    """`math`: math-verify compares the last box with the ground truth. `code`: the last code block must pass
    the problem's tests. `math_or_code`: by the form of each ground truth. `reasoning_gym`: the score of the
    problem's task. `llm_judge`, `reward_model`: a server scores. Or `package.module:function` of a `def
    score(prompt: Prompt, response: str) -> float` (docs/rewards.md)."""
    settings: Settings = field(default_factory=dict, kw_only=True)
    """Settings of `llm_judge` or `reward_model`, e.g. `{"url": "http://judge:8000/v1", "model": "qwen"}`, or
    keyword arguments of your function. As a flag one JSON object, which replaces the recipe's."""
    correct: float = 1.0
    """Reward of a right answer (built-in functions). A score between 0 and 1 is interpolated from `wrong`."""
    wrong: float = 0.0
    """Reward of a wrong or missing answer (built-in functions)."""
    failed: float = 0.0
    """Reward of a response that could not be scored, with `on_failure=value`; no penalties."""
    on_failure: Literal["leave_out", "value"] = field(default="leave_out", kw_only=True)
    """A response whose scoring raised, hung, died or gave no finite number, or whose environment failed.
    `leave_out`: it is not trained on; a group with fewer than two others is dropped. `value`: it has the
    reward `failed`, unless no response of its group has a score."""
    outage_minutes: Annotated[float, Gt(0)] = field(default=30.0, kw_only=True)
    """Longest time in which no response can be scored; then the run saves and ends with exit code 3."""
    workers: Annotated[int, Ge(1)] = 2
    """Processes that score responses, on rank 0's machine; none for `llm_judge` and `reward_model`."""
    time_limit_s: Annotated[float, Gt(0)] = 30.0
    """Time limit for scoring one response; for programs ten times as much."""
    memory_limit_mb: Annotated[int, Ge(256)] = 4096
    """Memory that scoring one response may take beyond an idle worker's; also of each process of tested code.
    """
    math_allow_operations: bool = field(default=False, kw_only=True)
    """Mathematics: accept an unevaluated operation (`578+328`, `10!`) for its value
    (docs/rewards.md#mathematics)."""
    code_case_limit_s: Annotated[float, Gt(0)] = 6.0
    """Limit of one test of a program, in seconds of processor time and sleep; all tests of a response
    have 0.9 `time_limit_s`."""
    allow_weak_sandbox: bool = False
    """Run programs even where the kernel lacks a wall of the sandbox (docs/rewards.md#the-sandbox)."""
    sandbox_url: str | None = field(default=None, kw_only=True)
    """SandboxFusion server that runs the programs, e.g. `http://sandbox:8080/run_code`
    (docs/rewards.md#a-sandboxfusion-server)."""
    format_pattern: str | None = None
    """Regular expression that the whole response must match; `.` matches newlines. Where the chat template
    has opened the thinking part, a match with `<think>` in front counts."""
    format_penalty: Annotated[float, Ge(0)] = 0.0
    """Penalty for a response that does not match format_pattern."""
    overlong_tokens: Annotated[int, Ge(0)] = 0
    """Width of the soft overlong zone before `rollout.max_response_tokens`, in tokens (DAPO, Eq. 13)."""
    overlong_penalty: Annotated[float, Ge(0)] = 0.0
    """Penalty for a response of full length; it falls linearly to 0 where the zone begins (DAPO, Eq. 13)."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective and its updates: loss, clipping bounds, advantages, the ratio's old policy, corrections
    and masks, KL terms, mismatch checks, updates per batch."""

    bounds: BoundsConfig = field(default_factory=paper)
    """Clipping bounds; presets in `bapo_megatron.algo.bapo`, of which `paper()` is the default. Another
    loss reads fixed ones or none."""
    loss: str = field(default="clip", kw_only=True)
    """The loss of an update. `clip`: the clipped surrogate of PPO at `bounds`, searched or fixed (GRPO,
    clip-higher). Others: docs/losses.md. Or `package.module:Name` of a subclass of
    `bapo_megatron.algo.losses.Loss`."""
    loss_settings: Settings = field(default_factory=dict, kw_only=True)
    """Settings of the loss, e.g. `{"ratio_high": 4.0}` of `cispo` (docs/losses.md). As a flag one JSON
    object, which replaces the recipe's."""
    advantage: str = "grpo"
    """The advantage of a response. `grpo`: (reward - group mean) / group std. `dr_grpo`: reward - group mean.
    `rloo`, `grpo_leave_one_out`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gdpo`:
    docs/losses.md#advantages-masks-terms. Or `package.module:function`:
    docs/extending.md#5-an-advantage-a-mask-a-term."""
    branch_reward: Literal["whole", "split"] = field(default="whole", kw_only=True)
    """Advantage of a branch of an episode, where an agent program rewrites its history or holds several
    conversations. `whole`: the episode's. `split`: the episode's, divided by the number of its branches."""
    polarity: PapoConfig = field(default_factory=PapoConfig)
    """PAPO: advantages reweighted by each token's effect on the entropy; off by default."""
    loss_mean: Literal["token", "sequence", "constant"] = "token"
    """Mean of the loss. `token`: over the tokens of the update. `sequence`: first within each response, then
    over responses. `constant`: over responses, each one's sum divided by `rollout.max_response_tokens` (Dr.
    GRPO). Each branch of an episode counts as a response; with `branch_reward=split` episodes count alike."""
    advantage_settings: Settings = field(default_factory=dict, kw_only=True)
    """Settings of the advantage, e.g. `{"weights": {"correct": 1, "format": 0.5}}` of `gdpo`. As a flag one
    JSON object, which replaces the recipe's."""
    known_ratio: bool = True
    """Take the ratio as 1, without the forward pass that measures it, in the search of an on-policy update:
    one whose every token the present weights sampled, or, with `old_log_probs=trainer`, the first of each
    step. GSPO, VESPO, M2PO and P3O do so only in the latter case."""
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """Log-probs of the old policy, the denominator of the ratio. `rollout`: those that the engine reported.
    `trainer`: recomputed before the step's first update, by one forward pass a step (PPO's pi_old)."""
    importance_cap: Annotated[float | None, Gt(0)] = None
    """Truncated importance sampling, with `old_log_probs=trainer`: each token's weight is multiplied by
    min(pi_old / pi_rollout, cap). 2 is usual; None: none."""
    importance_level: Literal["token", "sequence"] = field(default="token", kw_only=True)
    """Level of the importance weight: `token`, or `sequence`, the product over the response for all of its
    tokens."""
    corrections: CorrectionsConfig = field(default_factory=CorrectionsConfig, kw_only=True)
    """Rejection of whole responses that another policy sampled, with any loss; off by default."""
    masks: Parts = field(default=(), kw_only=True)
    """Rules that take a response or tokens of it out of each update, in their order, with `name` and
    `settings` (docs/losses.md#advantages-masks-terms). As a flag a JSON list, which replaces the recipe's:
    `["cut_responses", {"name": "icepop", "settings": {"high": 2}}]`. A name may be `package.module:function`.
    """
    terms: Parts = field(default=(), kw_only=True)
    """Terms that are added to the loss, in the form of `masks`: `[{"name": "entropy_bonus", "settings":
    {"coefficient": 0.001}}]`."""
    reference_kl: ReferenceKlConfig = field(default_factory=ReferenceKlConfig, kw_only=True)
    """KL penalty to a frozen reference policy, in the loss or in the reward; off by default."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig, kw_only=True)
    """On-policy distillation from a frozen teacher, a term of the loss; off by default."""
    gap_mean_limit: Annotated[float | None, Gt(0)] = 0.05
    """Mismatch check: largest mean difference between the log-probs of engine and trainer at the same
    weights, in nats (`rollout/engine_gap_mean`). None: no check."""
    gap_max_limit: Annotated[float | None, Gt(0)] = None
    """Mismatch check: largest difference at a single token, in nats (`rollout/engine_gap_max`). None: no
    check."""
    route_mismatch_limit: Annotated[float | None, Gt(0)] = field(default=0.3, kw_only=True)
    """Mismatch check of routes: largest share of tokens that engine and trainer route differently at the same
    weights, in the mean over the layers (`routes/engine_mismatch`), with `rollout.route_replay`. In bfloat16
    0.1 is usual. None: no check."""
    on_gap: Literal["warn", "stop"] = "warn"
    """Action of a failed mismatch check: a warning and an event, or the end of the run."""
    reuse_epochs: Annotated[int, Ge(1)] = 1  # E + 1
    """Passes over each batch of rollouts: 1 uses each sample once, more reuse it off-policy."""
    updates_per_epoch: Annotated[int, Ge(1)] = 1
    """Optimizer updates in each pass: mini-batches of the batch."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (hyperparameters, device, kernel), gradient clipping, and a learning-rate schedule in updates."""

    lr: Annotated[float, Ge(0)] = 2e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Ge(0)] = 0.0
    """Learning rate where the decay ends."""
    warmup_updates: Annotated[int, Ge(0)] = 0
    """Updates of linear warmup from zero."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warmup, over the planned updates of the run."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Weight decay of matrices; norms and biases have none."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Number added to the denominator of an update."""
    clip_grad: Annotated[float, Gt(0)] = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    device: Literal["model", "cpu"] = "model"
    """Device of master weights, moments and the optimizer step: the model's, or the host. Then a GPU holds 12
    bytes a parameter less, divided by DP x CP."""
    fused: bool = True
    """On a CPU: AdamW by torch's fused kernel, whose last bits differ, so a run that began without it
    continues so. A GPU has the kernel that megatron takes, device=cpu always a fused one."""


@dataclass(frozen=True)
class BatchConfig:
    """Micro-batches: pack size, activation recomputation, order of forward passes, output-layer chunks."""

    pack_tokens: Annotated[int, Ge(1)] = 16384
    """Length of a micro-batch, in tokens. It must hold the longest prompt and response together."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: `selective` of the MLPs or experts, on a CPU also of the attention; `full` of
    whole layers."""
    hold_forwards: bool = False
    """Run all forward passes of an update before its first backward pass, so that the exact search, if there
    is one, needs no forward pass of its own. Keeps the activations of all packs: use it with recompute=full;
    needs parallel.pipeline=1."""
    logprob_chunk_tokens: Annotated[int | None, Ge(1)] = None
    """Tokens whose logits are in memory at the same time: up to 8 bytes for each token and entry of a TP
    rank's vocabulary. None: 4,096 on a GPU, 1,024 on a CPU."""

    def chunk_tokens(self, gpu: bool) -> int:
        """Return ``logprob_chunk_tokens``, or its default on a GPU or CPU.

        A chunk costs a GPU some 150 kernels whatever its size. At 32B on TP 8, 1,024 tokens are 0.4 ms of
        matrix work, less than their launches take; 4,096 take 0.6 GB at most. A CPU has no such cost.
        """
        return self.logprob_chunk_tokens or (4096 if gpu else 1024)
