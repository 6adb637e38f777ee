"""Configuration of an RL run (``RunConfig``) or of SFT (``SftConfig``), and the sections of a run's outputs.

A recipe returns one of them, and flags override its fields. Frozen dataclasses; the docstring of a field is
its text in ``--help``. ``check`` validates the fields alone: it raises one ConfigError with every wrong type
or, without one, every broken range and rule. ``trainer/preflight.py`` checks dataset and model folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from bapo_megatron.algo.settings import out_of_range, wrong_types
from bapo_megatron.config.sections import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
)
from bapo_megatron.config.sources import EnvironmentConfig
from bapo_megatron.config.validation import (
    data_problems,
    parallel_problems,
    raise_problems,
    range_problems,
    run_problems,
)
from bapo_megatron.runtime.run_paths import RunPaths


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: how often to write them, which to keep, which to export, the command for each export."""

    every: Annotated[int, Ge(1)] = 10
    """Steps between checkpoints; the last step always has one."""
    keep_last: Annotated[int, Ge(0)] = 2
    """Newest checkpoints that are kept. 0 keeps all."""
    keep_every: Annotated[int | None, Ge(1)] = None
    """Steps between checkpoints that are never deleted, a multiple of `every`, nor the rollouts since the
    first of them. None: none."""
    keep_best: Annotated[int, Ge(0)] = 0
    """Checkpoints that are kept for the highest `eval/mean` of their weights; here unjudged responses count
    as wrong."""
    export_every: Annotated[int, Ge(0)] = 0
    """Steps between Hugging Face folders, exports/step_NNNNNN in the run directory. A multiple of `every`; 0:
    only the export at the end of the run."""
    after_export: str | None = None
    """Command that runs for each complete export: {folder}, {step} and {name} (the run's) are replaced,
    without a shell. Its failure does not fail the run (docs/operations.md#your-own-commands)."""
    after_export_minutes: Annotated[float, Gt(0)] = 60.0
    """Longest time of such a command; then it is killed."""
    background: bool = True
    """Write while training continues, from a copy of the state in host memory."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out problems: interval, suites, sampling. Training waits for it."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between evaluations; the first weights are evaluated too, and the last (`last`). 0, or a
    `rollout.replay` without engines: never."""
    suites: tuple[str, ...] = ()
    """Suites of `bapo data prepare`, by name, or files with the format of `data.path`."""
    samples: Annotated[int, Ge(1)] = 4
    """Responses to each problem."""
    temperature: Annotated[float | None, Ge(0)] = None
    """Sampling temperature. None: that of the rollouts."""
    max_response_tokens: Annotated[int | None, Ge(1)] = None
    """Longest response, in tokens. None: that of the rollouts."""
    last: bool = field(default=True, kw_only=True)
    """Evaluate the weights of the last step, also where `every` does not divide the steps."""


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles of chosen steps and ranks: traces by torch's profiler, GPU memory snapshots."""

    steps: tuple[int, ...] = ()
    """Steps that torch's profiler traces: updates and weight sync."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that are traced."""
    memory: bool = False
    """Put allocations into the trace, and on a GPU write a memory snapshot."""


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


@dataclass(frozen=True)
class LoggingConfig:
    """Logging: metric trackers, targets of events, stall limit, a note for the report."""

    tensorboard: bool = True
    """Former name: False takes TensorBoard from `trackers`."""
    wandb_project: str | None = None
    """Former name: adds `wandb` to `trackers`, and is W&B's project."""
    on_event: tuple[str, ...] = ()
    """Targets of the run's events (done, stalled, failed, requeued, engine lost, ...): commands, which get
    them as JSON on standard input, http(s) URLs, or $NAME, an environment variable with one
    (docs/operations.md#your-own-commands)."""
    stalled_minutes: Annotated[float | None, Gt(0)] = None
    """Silence (no step, evaluation or rollout) that is an event `stalled`. None: three times the longest of
    the last ten steps, at least ten minutes; an hour before the first step and where an evaluation is due."""
    note: str = ""
    """Note for readers, which `bapo report` shows first."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Boards of metrics: any of `tensorboard`, `wandb`, `trackio`, `mlflow`. The last three need their
    packages (extra `trackers`)."""
    catch_up_minutes: Annotated[float, Gt(0)] = 1.0
    """Longest wait at a run's end until the boards have all rows; ten seconds for a preempted run."""
    project: str = "bapo-megatron"
    """Project of W&B and trackio, experiment of MLflow. The run has its `name` there."""

    @property
    def chosen(self) -> tuple[TrackerName, ...]:
        """The chosen trackers, each once, including those of the former fields."""
        named = dict.fromkeys(self.trackers)
        if not self.tensorboard:
            named.pop("tensorboard", None)
        if self.wandb_project is not None:
            named["wandb"] = None
        return tuple(named)


@dataclass(frozen=True)
class RunConfig:
    """Configuration of one RL training run: all sections, name, steps, seed, directory.

    A recipe returns it and the command line overrides its fields; recipes/ has complete ones. ``check``
    raises ConfigError with every mistake. Its properties are derived values and paths.
    """

    name: str
    """Name of the run, and of its directory runs/NAME unless run_dir says otherwise."""
    model: ModelConfig
    data: DataConfig
    steps: Annotated[int, Ge(1)] = 100
    """Steps of the run; each has one batch and reuse_epochs x updates_per_epoch updates."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of shuffling, sampling and the split into updates."""
    run_dir: Path | None = None
    """Run directory; an existing one is continued."""
    allow_change: tuple[str, ...] = ()
    """Fields, such as optimizer.lr, whose values may differ from those that the existing run was started
    with."""
    accept_resume_mismatch: tuple[str, ...] = ()
    """Accepted differences of the resume check, as CHECKPOINT:NAME, such as step_000120:canary, for that
    checkpoint alone."""
    threads: Annotated[int | None, Ge(1)] = None
    """CPU threads of each rank, in a run without a GPU. None: the environment's number at the start of the
    run (OMP_NUM_THREADS, else its share of the cores), which resumed runs keep. Another number adds in
    another order."""
    hang_minutes: Annotated[float, Ge(0)] = 60.0
    """Hang watchdog: a rank that makes no update for so long, and does not wait for rollouts, prints its
    stacks and exits. 0: never."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.run_dir or Path("runs") / self.name

    @property
    def paths(self) -> RunPaths:
        """The paths in the run directory."""
        return RunPaths(self.directory)

    @property
    def planned_updates(self) -> int:
        """Number of updates of the whole run: the length of the learning-rate schedule."""
        return self.steps * self.algorithm.reuse_epochs * self.algorithm.updates_per_epoch

    @property
    def reward_functions(self) -> tuple[str, ...]:
        """Reward functions in use: those of the sources, and that of the evaluation suites."""
        function = self.reward.function
        of_sources = [source.reward or function for source in self.data.files]
        of_suites = [function] if self.evaluation.every else []
        return tuple(dict.fromkeys([*of_sources, *of_suites]))

    @property
    def environments(self) -> dict[str, EnvironmentConfig]:
        """The environment of each source, by the source's name; one without a ``function`` means none. The
        empty name is for `data.path`, and for evaluation suites without a source (``source_of_suite``)."""
        environments = {"": self.environment} if self.evaluation.every or not self.data.sources else {}
        for source in self.data.sources:
            environments[source.name] = self.environment if source.environment is None else source.environment
        return environments

    def source_of_suite(self, suite: str) -> str:
        """Return the source whose environment an evaluation suite uses: the source of the same name, or the
        empty name, for the run's section ``environment``."""
        return suite if suite in self.data.source_names else ""

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation is due after ``step``; never in a replay."""
        every, is_last = self.evaluation.every, self.evaluation.last and step == self.steps
        return every > 0 and (step % every == 0 or is_last) and self.rollout.replay is None

    @property
    def evaluation_sampling(self) -> tuple[float, int]:
        """Temperature and longest response, in tokens, of evaluations."""
        own, rollout = self.evaluation, self.rollout
        temperature = rollout.temperature if own.temperature is None else own.temperature
        return temperature, own.max_response_tokens or rollout.max_response_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def longest_request(self) -> int:
        """Most tokens of prompt and response together in a request to an engine, evaluations included."""
        evaluated = self.evaluation_sampling[1] if self.evaluation.every else 0
        return self.data.max_prompt_tokens + max(self.rollout.max_response_tokens, evaluated)

    def check(self) -> None:
        """Raise ConfigError with every mistake that the fields show by themselves."""
        raise_problems(list(wrong_types(self)) or list(run_problems(self)))


@dataclass(frozen=True)
class SftConfig:
    """Configuration of supervised fine-tuning (SFT), the warm start: next-token training on solutions.
    Independent of ``RunConfig``; a recipe for `bapo sft` returns it."""

    model: ModelConfig
    data: DataConfig
    """Problems whose `extra_info.solution` holds a full response."""
    output: Path
    """Hugging Face folder to write."""
    updates: Annotated[int, Ge(1)] = 100
    """Number of optimizer updates."""
    samples_per_update: Annotated[int, Ge(1)] = 64
    """Sequences in each update."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the order of the samples."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)

    def check(self) -> None:
        """Raise ConfigError with every mistake that the fields show by themselves."""
        raise_problems(list(wrong_types(self)) or list(self._problems()))

    def _problems(self) -> Iterator[str]:
        yield from out_of_range(self)
        yield from parallel_problems(self.parallel)
        yield from data_problems(self.data)
        yield from range_problems(self.optimizer)
