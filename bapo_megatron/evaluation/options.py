"""Options of ``bapo eval`` as dataclasses: flags, their checks, and the run configuration of its engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Gt

from bapo_megatron.algo.settings import out_of_range
from bapo_megatron.config import (
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.config.flags import Settings
from bapo_megatron.config.validation import (
    REWARD_ENDPOINTS,
    environment_problems,
    raise_problems,
    sandbox_problems,
)
from bapo_megatron.data.prepare.options import SUITES
from bapo_megatron.data.problem_sets import REWARD_FUNCTION


@dataclass(frozen=True)
class EvalOptions:
    """Options of `bapo eval`: one checkpoint, some suites, how they are sampled."""

    checkpoint: tyro.conf.Positional[Path]
    """A Hugging Face folder, a run's directory, one of its checkpoints, or a checkpoint of Megatron."""
    suite: str
    """Names of suites, or paths of prepared files, separated by commas."""
    suites: Path = SUITES
    """Folder with the suites."""
    output: Path | None = None
    """Output folder, with a folder for each suite; an existing evaluation is continued. None:
    `evaluations/` and the checkpoint's name."""
    step: str = "latest"
    """Which checkpoint of a run."""
    hf_reference: Path | None = None
    """Hugging Face folder of the model, for a checkpoint that carries no config and tokenizer."""
    samples: Annotated[int, Ge(1)] = 16
    """Responses to each problem: n of avg@n. May change when an evaluation is continued."""
    pass_at: tuple[int, ...] = (1, 4, 16)
    """Each k of pass@k, up to `samples`; larger ones are left out."""
    temperature: Annotated[float, Ge(0)] = 0.6
    """Sampling temperature; 0 takes the most probable token."""
    max_response_tokens: Annotated[int, Ge(1)] = 32768
    """Responses are cut here, and count as truncated."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 2048
    """A suite with a longer prompt is refused."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of sampling (local engine) and of the bootstrap."""
    engine: str = "local"
    """`local`: in this process. `sglang`: servers, see `sglang`. Or `package.module:Name`, as
    `rollout.engine` of a run."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the model's weights."""
    max_batch: Annotated[int, Ge(1)] = 64
    """Requests that the local engine decodes at a time."""
    reward: str | None = None
    """`package.module:function`, a reward of your own, `reasoning_gym`, `llm_judge` or `reward_model`
    (docs/rewards.md). None: mathematics or programs, by the form of each ground truth."""
    reward_settings: Settings = field(default_factory=dict)
    """Settings of `reward`, as `reward.settings` of a run: one JSON object."""
    reward_correct: float = 1.0
    """Lowest reward of a right response, for `reward`."""
    judges: Annotated[int, Ge(1)] = 2
    """Processes that judge responses."""
    judge_limit_s: Annotated[float, Gt(0)] = 30.0
    """Longest judgement of a response; then it counts as unjudged, and as neither right nor wrong."""
    allow_weak_sandbox: bool = False
    """Run programs even where the kernel lacks a wall of the sandbox (docs/rewards.md#the-sandbox)."""
    sandbox_url: str | None = None
    """Address of a SandboxFusion server that runs programs, as `reward.sandbox_url` of a run."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    """The servers of `engine=sglang`."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """What answers the model's turns, as in a run."""

    @property
    def names(self) -> list[str]:
        return [name for name in self.suite.split(",") if name]

    @property
    def wanted_pass_at(self) -> tuple[int, ...]:
        """Each k of ``pass_at`` that ``samples`` responses allow, sorted."""
        return tuple(sorted({k for k in self.pass_at if k <= self.samples}))

    @property
    def rollout(self) -> RolloutConfig:
        """Sampling settings as the rollout section of a run configuration."""
        return RolloutConfig(
            temperature=self.temperature,
            max_response_tokens=self.max_response_tokens,
            engine=self.engine,
            max_batch=self.max_batch,
            sglang=self.sglang,
        )

    def check(self) -> None:
        """Raise one ConfigError with every error that the flags alone reveal."""
        raise_problems(list(self._problems()))

    def _problems(self) -> Iterator[str]:
        if not self.names:
            yield "suite names nothing; give e.g. --suite aime24,math500"
        if len(set(self.names)) < len(self.names):
            yield f"suite={self.suite} names a suite twice"
        yield from out_of_range(self)
        yield from (f"pass_at={k} must be at least 1" for k in self.pass_at if k < 1)
        if self.temperature == 0 and self.samples > 1:
            yield f"temperature=0 gives the same response each time: set samples=1, not {self.samples}"
        names = ("reasoning_gym", *REWARD_ENDPOINTS)
        if self.reward is not None and ":" not in self.reward and self.reward not in names:
            listed = ", ".join(names)
            yield (
                f"reward={self.reward} must be package.module:function or one of {listed}, or left out for "
                f"math and code"
            )
        if self.reward_settings and self.reward in (None, "reasoning_gym"):
            yield f"reward_settings needs reward: name whose settings they are; {self.reward} takes none"
        yield from environment_problems(self.environment)
        yield from sandbox_problems("sandbox_url", self.sandbox_url)

    def run_config(self, model: Path, output: Path, longest_prompt: int, programs: bool = True) -> RunConfig:
        """Return the run configuration for this evaluation's engines, pool and sandbox.

        Servers get the context for ``longest_prompt`` tokens and a whole response. ``programs``: some
        responses are programs, which need the sandbox.
        """
        limit_s = self.judge_limit_s
        return RunConfig(
            name="evaluation",
            model=ModelConfig(hf_path=model, dtype=self.dtype),
            data=DataConfig(path=output, max_prompt_tokens=longest_prompt),
            run_dir=output,
            seed=self.seed,
            rollout=self.rollout,
            environment=self.environment,
            reward=RewardConfig(
                function=self.reward or (REWARD_FUNCTION if programs else "math"),
                settings=self.reward_settings,
                correct=self.reward_correct if self.reward else RewardConfig.correct,
                allow_weak_sandbox=self.allow_weak_sandbox,
                sandbox_url=self.sandbox_url,
                workers=self.judges,
                time_limit_s=limit_s,
                code_case_limit_s=min(RewardConfig.code_case_limit_s, limit_s),
            ),
        )

    def sampling(self) -> dict[str, Any]:
        """Return the settings that determine responses besides model and problem; equal within one
        evaluation."""
        environment = self.environment
        within = {
            "function": environment.function,
            "settings": environment.settings,
            "max_turns": environment.max_turns,
        }
        return {
            **({"environment": within} if environment.function is not None else {}),
            "temperature": self.temperature,
            "max_response_tokens": self.max_response_tokens,
            "seed": self.seed,
            "engine": self.engine,
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class CompareOptions:
    """Options of `bapo eval compare`: two evaluations, compared problem by problem."""

    a: tyro.conf.Positional[Path]
    """An output of `bapo eval`, or the folder of one suite in it."""
    b: tyro.conf.Positional[Path]
    """Another of the same suites; differences are B - A."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the comparison as a list of one object a suite."""
    examples: Annotated[int, Ge(0)] = 0
    """Problems of each suite to print with the first response of each evaluation: the suite's first ones."""

    def check(self) -> None:
        """Raise ConfigError for a value out of its range."""
        raise_problems(list(out_of_range(self)))
