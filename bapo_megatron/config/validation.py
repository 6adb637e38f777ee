"""What the fields of a configuration say about each other, each mistake with its remedy."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_type_hints

from typeguard import TypeCheckError, check_type

from bapo_megatron.config.engine import EngineConfig
from bapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.algo.bounds import BoundsConfig
    from bapo_megatron.config import (
        AlgorithmConfig,
        CheckpointConfig,
        ParallelConfig,
        RewardConfig,
        RunConfig,
        SftConfig,
    )


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


def raise_problems(problems: list[str]) -> None:
    """ConfigError with all of them, if there are any."""
    if problems:
        raise ConfigError("\n".join(problems))


def wrong_types(config: object, prefix: str = "") -> Iterator[str]:
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
            yield from wrong_types(value, f"{path}.")


def run_problems(run: RunConfig) -> Iterator[str]:
    """Every mistake that the fields of a run show by themselves."""
    yield from _out_of_range(run)
    yield from _parallel_problems(run.parallel)
    yield from _bounds_problems(run.algorithm.bounds)
    yield from _importance_problems(run.algorithm)
    yield from _hold_problems(run)
    yield from _pack_problems(run)
    yield from _export_problems(run.checkpoint)
    yield from _engine_problems(run)
    yield from _staleness_problems(run)
    yield from _evaluation_problems(run)
    yield from _reward_problems(run.reward, run.rollout.max_response_tokens)
    if run.algorithm.updates_per_epoch > run.rollout.prompts_per_step:
        yield (
            f"algorithm.updates_per_epoch={run.algorithm.updates_per_epoch} is more than "
            f"rollout.prompts_per_step={run.rollout.prompts_per_step}: an update needs at least one group"
        )
    if run.data.min_difficulty > run.data.max_difficulty:
        yield (
            f"data.min_difficulty={run.data.min_difficulty} is above "
            f"data.max_difficulty={run.data.max_difficulty}"
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
    "rollout.sglang.servers": 1,
    "rollout.sglang.tensor": 1,
    "rollout.sglang.first_gpu": 0,
    "rollout.max_oversampling": 1,
    "rollout.max_staleness": 0,
    "rollout.segment_tokens": 1,
    "rollout.keep_steps": 0,
    "rollout.budget_tokens": 1,
    "rollout.sglang.max_in_flight": 1,
    "rollout.custom_engine.max_in_flight": 1,
    "reward.workers": 1,
    "reward.memory_limit_mb": 256,  # an interpreter with its imports
    "reward.format_penalty": 0,
    "reward.overlong_tokens": 0,
    "reward.overlong_penalty": 0,
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
    "checkpoint.keep_best": 0,
    "evaluation.every": 0,
    "evaluation.samples": 1,
    "evaluation.temperature": 0,
    "evaluation.max_response_tokens": 1,
    "checkpoint.keep_every": 1,
    "checkpoint.export_every": 0,
}
_ABOVE_ZERO = (
    "algorithm.importance_cap",
    "algorithm.gap_mean_limit",
    "algorithm.gap_max_limit",
    "algorithm.polarity.target_entropy",
    "algorithm.polarity.band",
    "rollout.temperature",
    "rollout.sglang.memory_fraction",
    "rollout.sglang.start_minutes",
    *(
        f"rollout.{engine}.{name}"
        for engine in ("sglang", "custom_engine")
        for name in ("bucket_mb", "update_minutes", "request_minutes", "lost_minutes")
    ),
    "reward.time_limit_s",
    "reward.code_case_limit_s",
    "optimizer.clip_grad",
    "optimizer.eps",
    "parallel.timeout_minutes",
)
_BELOW_ONE = (
    "optimizer.beta1",
    "optimizer.beta2",
    "algorithm.polarity.strength",
    "algorithm.polarity.memory",
)


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


def _pack_problems(run: RunConfig) -> Iterator[str]:
    """A full-length sequence must fit into a pack that the layout can cut."""
    multiple, needed = run.parallel.length_multiple, run.parallel.pack_tokens_for(run.longest_sequence)
    if run.batch.pack_tokens >= needed:
        return
    cut = (
        f", rounded up to a multiple of {multiple} for this layout," if needed > run.longest_sequence else ""
    )
    yield (
        f"batch.pack_tokens={run.batch.pack_tokens} is smaller than data.max_prompt_tokens + "
        f"rollout.max_response_tokens = {run.longest_sequence}{cut}: a full-length sequence would not fit; "
        f"set it to at least {needed}"
    )


def _export_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    every, export = checkpoint.every, checkpoint.export_every
    if every > 0 and export % every:
        yield (
            f"checkpoint.export_every={export} must be a multiple of checkpoint.every={every}, because a "
            f"checkpoint is what is exported: set it to {max(1, round(export / every)) * every}"
        )


def _importance_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.importance_cap is not None and algorithm.old_log_probs == "rollout":
        yield (
            f"algorithm.importance_cap={algorithm.importance_cap} weighs tokens by pi_old / pi_rollout, "
            f"which is 1 with algorithm.old_log_probs=rollout: set that to trainer, or leave the cap out"
        )


def _hold_problems(run: RunConfig) -> Iterator[str]:
    if not run.batch.hold_forwards:
        return
    if run.parallel.pipeline > 1:
        yield (
            f"batch.hold_forwards needs parallel.pipeline=1, not {run.parallel.pipeline}: a pipeline runs "
            f"backward passes between its forward passes"
        )
    if run.algorithm.bounds.scope != "update":
        yield (
            f"batch.hold_forwards serves the exact search (algorithm.bounds.scope=update); with "
            f"scope={run.algorithm.bounds.scope} leave it out"
        )


def _staleness_problems(run: RunConfig) -> Iterator[str]:
    rollout = run.rollout
    if rollout.budget_tokens is None:
        return
    longest = rollout.budget_tokens * (rollout.max_staleness + 1)
    if longest < rollout.max_response_tokens:
        needed = -(-rollout.max_response_tokens // rollout.budget_tokens) - 1
        yield (
            f"rollout.budget_tokens={rollout.budget_tokens} in each of rollout.max_staleness + 1 = "
            f"{rollout.max_staleness + 1} steps is less than rollout.max_response_tokens="
            f"{rollout.max_response_tokens}: long responses would always be too old; set "
            f"rollout.max_staleness={needed}"
        )


def _evaluation_problems(run: RunConfig) -> Iterator[str]:
    own, best = run.evaluation, run.checkpoint.keep_best
    if own.every and not own.suites:
        yield f"evaluation.every={own.every} needs evaluation.suites: name at least one"
    if best and not own.every:
        yield f"checkpoint.keep_best={best} needs evaluation.every: without evaluations none is best"
    elif best and own.every % run.checkpoint.every:
        yield (
            f"evaluation.every={own.every} is no multiple of checkpoint.every={run.checkpoint.every}: then "
            "checkpoint.keep_best would look at weights that have no checkpoint"
        )


def _engine_problems(run: RunConfig) -> Iterator[str]:
    for item in dataclasses.fields(run.rollout):
        value = getattr(run.rollout, item.name)
        if isinstance(value, EngineConfig):
            yield from (f"rollout.{item.name}.{problem}" for problem in value.problems(run.longest_request))


REWARD_FUNCTIONS = ("math", "code", "math_or_code")
"""The built-in ones."""


def _reward_problems(reward: RewardConfig, max_response_tokens: int) -> Iterator[str]:
    if reward.function not in REWARD_FUNCTIONS and not re.fullmatch(r"[\w.]+:\w+", reward.function):
        yield (
            f"reward.function={reward.function!r} is unknown: give {', '.join(REWARD_FUNCTIONS)}, or the "
            f"path of a function as package.module:function"
        )
    if reward.format_pattern is not None:
        try:
            re.compile(reward.format_pattern, re.DOTALL)
        except re.error as error:
            yield f"reward.format_pattern={reward.format_pattern!r} is no regular expression: {error}"
    elif reward.format_penalty:
        yield f"reward.format_penalty={reward.format_penalty} needs reward.format_pattern: set both or none"
    if reward.overlong_tokens >= max_response_tokens:
        yield (
            f"reward.overlong_tokens={reward.overlong_tokens} must be below "
            f"rollout.max_response_tokens={max_response_tokens}: the zone lies before the longest response"
        )
    if reward.overlong_penalty and not reward.overlong_tokens:
        yield (
            f"reward.overlong_penalty={reward.overlong_penalty} needs reward.overlong_tokens, the width of "
            f"the zone: set it above 0"
        )
    if reward.code_case_limit_s > reward.time_limit_s:
        yield (
            f"reward.code_case_limit_s={reward.code_case_limit_s} is above "
            f"reward.time_limit_s={reward.time_limit_s}, the limit of all tests together: lower it"
        )


def _bounds_problems(bounds: BoundsConfig) -> Iterator[str]:
    for problem in bounds.problems():
        yield f"algorithm.bounds.{problem}"


def sft_problems(config: SftConfig) -> Iterator[str]:
    """Every mistake that the fields of a warm start show by themselves."""
    yield from _out_of_range(config)
    yield from _parallel_problems(config.parallel)
