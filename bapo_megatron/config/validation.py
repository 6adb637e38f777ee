"""Rules between the fields of a configuration, without files, GPU or network.

Functions ``*_problems`` yield errors, each one line with the field and the fix; ``raise_problems`` raises one
ConfigError with all. ``algo/settings.py`` checks each field's type and range.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bapo_megatron.algo.parts import RATIO_MASKS
from bapo_megatron.algo.settings import fields_of, out_of_range
from bapo_megatron.config.engines import EngineConfig
from bapo_megatron.config.parts import part_problems
from bapo_megatron.config.sections import (
    AlgorithmConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
)
from bapo_megatron.config.sources import EnvironmentConfig, source_problems
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import command_words

if TYPE_CHECKING:
    from bapo_megatron.config import CheckpointConfig, RunConfig


def flat(config: object, prefix: str = "") -> dict[str, object]:
    """Return the leaf values of nested dataclasses by dotted names, e.g. ``optimizer.lr``."""
    return {
        path: value for path, value, _ in fields_of(config, prefix) if not dataclasses.is_dataclass(value)
    }


def raise_problems(problems: list[str]) -> None:
    """Raise one ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError("\n".join(problems))


def run_problems(run: RunConfig) -> Iterator[str]:
    """Yield all values out of range and all broken rules of a run whose fields have the right types."""
    yield from out_of_range(run)
    yield from parallel_problems(run.parallel)
    if not any(out_of_range(run.parallel)):  # which divides packs
        yield from _pack_problems(run)
    yield from _hold_problems(run)
    yield from _algorithm_problems(run)
    yield from staleness_problems(run.rollout)
    for name, value in vars(run.rollout).items():
        if isinstance(value, EngineConfig):
            yield from (f"rollout.{name}.{problem}" for problem in value.problems(run.longest_request))
    yield from _reward_problems(run.reward, run.rollout.max_response_tokens)
    yield from environment_problems(run.environment)
    yield from data_problems(run.data)
    yield from _source_reward_problems(run.data, run.reward)
    yield from _checkpoint_problems(run)
    yield from _hook_problems(run)
    yield from range_problems(run.optimizer)


def new_run_problems(run: RunConfig) -> Iterator[str]:
    """Yield mistakes for which only a new run is refused; a run that began with them continues."""
    if run.name.strip(" ./") == "":
        yield f"name={run.name!r} names no run: give one; its directory and boards have it, too"
    low, high = run.algorithm.bounds.low_start, run.algorithm.bounds.high_end
    if low >= 1 or high <= 1:
        yield (
            f"algorithm.bounds from {low:g} to {high:g} clip all tokens of a sign at a ratio of 1: bounds "
            "are ratios, not distances from 1; set low_start below it and high_end above, as 0.8 and 1.28"
        )
    reference = run.algorithm.reference_kl
    if reference.in_loss and reference.estimator == "k1" and not reference.unbiased:
        yield (
            "algorithm.reference_kl.estimator=k1 in the loss has a gradient that does not depend on the "
            "reference: take k2 or k3, or place=reward"
        )
    yield from _interval_problems(run.checkpoint, "keep_every", "only a checkpoint can be kept")


def parallel_problems(parallel: ParallelConfig) -> Iterator[str]:
    """Yield broken rules of the layout: what needs tensor or pipeline parallelism, layers per chunk."""
    if parallel.sequence and parallel.tensor == 1:
        yield "parallel.sequence needs parallel.tensor of at least 2: it splits over the TP ranks"
    if parallel.virtual > 1 and parallel.pipeline == 1:
        yield f"parallel.virtual={parallel.virtual} needs parallel.pipeline of at least 2"
    listed, chunks = parallel.pipeline_layers, parallel.pipeline * parallel.virtual
    if listed and len(listed) != chunks:
        yield (
            f"parallel.pipeline_layers has {len(listed)} numbers, but parallel.pipeline x virtual = "
            f"{parallel.pipeline} x {parallel.virtual}: give {chunks} numbers, or leave it out"
        )
    if any(layers < 1 for layers in listed):
        yield (
            f"parallel.pipeline_layers={' '.join(map(str, listed))} leaves a model chunk without layers: "
            "give each at least 1"
        )


def data_problems(data: DataConfig) -> Iterator[str]:
    """Yield broken rules of the sources of prompts, their rewards and their environments."""
    yield from source_problems(data.path, data.sources)
    for source in data.sources:
        if source.reward is not None:
            yield from _function_problems(f"data.sources[{source.name}].reward", source.reward)
        if source.environment is not None:
            yield from environment_problems(source.environment, environment_field(source.name))


def environment_field(source: str) -> str:
    """Return the field name of a source's own environment, for messages."""
    return f"data.sources[{source}].environment"


def _pack_problems(run: RunConfig) -> Iterator[str]:
    """A pack must hold the longest sequence, and the layout split it."""
    longest = run.longest_sequence
    multiple, needed = run.parallel.length_multiple, run.parallel.pack_tokens_for(longest)
    if run.batch.pack_tokens >= needed:
        return
    cut = f", rounded up to a multiple of {multiple} for this layout" if needed > longest else ""
    yield (
        f"batch.pack_tokens={run.batch.pack_tokens} is smaller than data.max_prompt_tokens + "
        f"rollout.max_response_tokens = {longest}{cut}: a full-length sequence would not fit; "
        f"set it to at least {needed}"
    )


def _algorithm_problems(run: RunConfig) -> Iterator[str]:
    algorithm, rollout = run.algorithm, run.rollout
    yield from part_problems(algorithm)
    yield from (f"algorithm.bounds.{problem}" for problem in algorithm.bounds.problems())
    for name in _comparing_old(algorithm) if algorithm.old_log_probs == "rollout" else ():
        yield (
            f"{name} compares pi_old with pi_rollout, equal with algorithm.old_log_probs=rollout: set that "
            "to trainer, or leave it out"
        )
    if algorithm.importance_cap is None and algorithm.importance_level != "token":
        yield (
            f"algorithm.importance_level={algorithm.importance_level} needs algorithm.importance_cap: set "
            f"both or none"
        )
    yield from _distillation_problems(run)
    if algorithm.updates_per_epoch > rollout.prompts_per_step:
        yield (
            f"algorithm.updates_per_epoch={algorithm.updates_per_epoch} is more than "
            f"rollout.prompts_per_step={rollout.prompts_per_step}: an update needs at least one group"
        )


def _comparing_old(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield the settings (weights, limits, masks) that compare pi_old with pi_rollout, as ``name=value``."""
    if algorithm.importance_cap is not None:
        yield f"algorithm.importance_cap={algorithm.importance_cap}"
    for name, value in vars(algorithm.corrections).items():
        if value is not None and name != "off_policy_delta":
            yield f"algorithm.corrections.{name}={value}"
    for number, part in enumerate(algorithm.masks):
        if part.name in RATIO_MASKS:
            yield f"algorithm.masks[{number}]={part.name}"


def _distillation_problems(run: RunConfig) -> Iterator[str]:
    field, distillation, rollout = "algorithm.distillation", run.algorithm.distillation, run.rollout
    if not distillation.enabled:
        return
    if not distillation.urls and rollout.replay is None:
        yield f"{field}.urls is empty: give the addresses of the teacher's SGLang servers, http://HOST:PORT"
    if rollout.temperature != 1.0:
        yield (
            f"{field} needs rollout.temperature=1, not {rollout.temperature:g}: at another SGLang gives no "
            "log-probs of given tokens"
        )
    if distillation.estimator == "k1":
        yield f"{field}.estimator=k1 has a gradient that does not depend on the teacher: take k2 or k3"


def _hold_problems(run: RunConfig) -> Iterator[str]:
    if run.batch.hold_forwards and run.parallel.pipeline > 1:
        yield (
            f"batch.hold_forwards needs parallel.pipeline=1, not {run.parallel.pipeline}: a pipeline runs "
            f"backward passes between its forward passes"
        )


def range_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield an error if the learning rates contradict each other; megatron's assertion names no field."""
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}"


def staleness_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield an error if ``budget_tokens`` would make a response of full length too stale."""
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


def environment_problems(environment: EnvironmentConfig, field: str = "environment") -> Iterator[str]:
    """Yield errors of ``environment``: the form of its class's path. ``field``: its name in messages."""
    function = environment.function
    if function is None:
        if environment.settings:
            yield f"{field}.settings needs {field}.function: set both or none"
    elif not re.fullmatch(r"[\w.]+:\w+|.+\.py:\w+", function):
        yield (
            f"{field}.function={function!r} names no class: give package.module:Name, or file.py:Name of one"
        )


def _interval_problems(checkpoint: CheckpointConfig, name: str, why: str) -> Iterator[str]:
    every, interval = checkpoint.every, getattr(checkpoint, name) or 0
    if every > 0 and interval % every:
        yield (
            f"checkpoint.{name}={interval} must be a multiple of checkpoint.every={every}, because {why}: "
            f"set it to {max(1, round(interval / every)) * every}"
        )


def _checkpoint_problems(run: RunConfig) -> Iterator[str]:
    checkpoint, evaluation = run.checkpoint, run.evaluation
    every, best = checkpoint.every, checkpoint.keep_best
    yield from _interval_problems(checkpoint, "export_every", "a checkpoint is what is exported")
    if evaluation.every and not evaluation.suites:
        yield f"evaluation.every={evaluation.every} needs evaluation.suites: name at least one"
    if best and not evaluation.every:
        yield f"checkpoint.keep_best={best} needs evaluation.every: without evaluations none is best"
    elif best and evaluation.every % every:
        yield (
            f"evaluation.every={evaluation.every} is not a multiple of checkpoint.every={every}: then "
            "checkpoint.keep_best would look at weights that have no checkpoint"
        )


def _hook_problems(run: RunConfig) -> Iterator[str]:
    """Rules of the user's command: its form. ``preflight.check_hooks`` looks for programs and targets."""
    command = run.checkpoint.after_export
    if command is None:
        return
    try:
        command_words(command)
    except ValueError as error:
        yield f"checkpoint.after_export={command!r}: {error}; give a program and its arguments"


BOXED_REWARDS = ("math", "code", "math_or_code")
"""Built-in reward functions that read a box or a block of code, and validate their ground truths."""

REWARD_FUNCTIONS = (*BOXED_REWARDS, "reasoning_gym")
"""Names of the built-in reward functions."""

REWARD_ENDPOINTS = ("llm_judge", "reward_model")
"""Names of the rewards that a server scores over HTTP."""

_HOW_REACHED = frozenset(("url", "api_key_env", "concurrency", "timeout_s", "give_up_s", "cache"))


def settings_of_scores(function: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a reward that change its scores: of an endpoint all but address and limits."""
    if function not in REWARD_ENDPOINTS:
        return settings
    return {name: value for name, value in settings.items() if name not in _HOW_REACHED}


def sandbox_problems(field: str, url: str | None) -> Iterator[str]:
    """Yield an error if ``url`` is not an address of a SandboxFusion server."""
    if url is not None and not re.fullmatch(r"https?://[^/@\s]+(/\S*)?", url):
        yield f"{field} is not an address: give http://HOST:PORT/run_code, without a user or a password"


def _function_problems(field: str, function: str) -> Iterator[str]:
    names = REWARD_FUNCTIONS + REWARD_ENDPOINTS
    if function not in names and not re.fullmatch(r"[\w.]+:\w+", function):
        yield (
            f"{field}={function!r} is unknown: give {', '.join(names)}, or the path of a function as "
            f"package.module:function"
        )


def _source_reward_problems(data: DataConfig, reward: RewardConfig) -> Iterator[str]:
    """Rules of a source's reward: an endpoint has settings only as `reward.function`."""
    for source in data.sources:
        if source.reward in REWARD_ENDPOINTS and source.reward != reward.function:
            yield (
                f"data.sources[{source.name}].reward={source.reward} has no settings: reward.settings are "
                f"those of reward.function={reward.function}; set reward.function={source.reward}, and name "
                f"{reward.function} as the reward of the other sources"
            )


def _reward_problems(reward: RewardConfig, max_response_tokens: int) -> Iterator[str]:
    yield from _function_problems("reward.function", reward.function)
    if reward.settings and reward.function in REWARD_FUNCTIONS:
        yield f"reward.settings: reward.function={reward.function} takes none; leave them out"
    if reward.format_pattern is not None and reward.function in REWARD_ENDPOINTS:
        yield (
            f"reward.format_pattern is matched in a reward worker, and reward.function={reward.function} has "
            f"none: leave it out, or ask the judge for it"
        )
    yield from sandbox_problems("reward.sandbox_url", reward.sandbox_url)
    if reward.format_pattern is not None:
        try:
            re.compile(reward.format_pattern, re.DOTALL)
        except re.error as error:
            yield f"reward.format_pattern={reward.format_pattern!r} is not a regular expression: {error}"
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
