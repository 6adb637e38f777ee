"""Registry of reward functions: checks and loads those named by ``reward.function`` and by prompt sources.

A name is a built-in, an endpoint, or the dotted path of a user's function. Before a run ``check_function``
raises ConfigError for an unusable function, and ``ground_truth_check`` returns the check of dataset rows. In
a reward worker ``built_in`` and ``load_function`` return the function to call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.config.validation import BOXED_REWARDS, REWARD_ENDPOINTS, REWARD_FUNCTIONS
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward import code, math
from bapo_megatron.reward.code_tests import check_tests, is_tests
from bapo_megatron.reward.endpoint_settings import read_settings
from bapo_megatron.reward.reasoning_gym import check_extra_info, score, tasks
from bapo_megatron.runtime.dotted_path import load_dotted_path

if TYPE_CHECKING:
    from bapo_megatron.types import Prompt

Score = Callable[["Prompt", str], float]

BuiltIn = Callable[[dict[str, Any], str], float]
"""Built-in reward function: maps prompt fields and a response to a score in [0, 1]."""

CODE_SHARE = 0.9
"""Share of `reward.time_limit_s` for all tests of a response: a slow program is wrong, not a failure."""


def settings_for(reward: RewardConfig, function: str) -> RewardConfig:
    """Return the reward section for ``function``: only `reward.function` gets `reward.settings`."""
    return reward if function == reward.function else replace(reward, function=function, settings={})


def check_function(reward: RewardConfig, field: str = "reward.function") -> None:
    """Check the reward function before a run. Raises ConfigError if it cannot be loaded or refuses its
    settings. ``field``: name in the configuration, for messages."""
    if reward.function in REWARD_ENDPOINTS:
        read_settings(reward.function, reward.settings)
    elif reward.function not in REWARD_FUNCTIONS:
        load_function(reward.function, reward.settings, field)


def check_functions(config: RunConfig, functions: Iterable[str]) -> None:
    """Run ``check_function`` on some of a run's reward functions; messages name the field that sets each."""
    of_sources = {source.reward: f"data.sources[{source.name}].reward" for source in config.data.sources}
    for function in functions:
        field = "reward.function" if function == config.reward.function else of_sources[function]
        check_function(settings_for(config.reward, function), field)


def needs_sandbox(reward: RewardConfig, functions: Iterable[str]) -> bool:
    """Whether one of the reward ``functions`` runs programs on this machine."""
    return reward.sandbox_url is None and any(map(runs_code, functions))


def runs_code(function: str) -> bool:
    """Whether the reward ``function`` runs programs."""
    return function in ("code", "math_or_code")


def ground_truth_check(function: str, begun: bool = False) -> Callable[[str], str | None] | None:
    """Return the check of ground truths for `math`, `code` or `math_or_code`: it returns the error of a text,
    or None. Returns None for any other function, which accepts every text. ``begun``: the run has steps and
    its ground truths were valid at the start, so the check accepts all."""
    if function not in BOXED_REWARDS:
        return None
    if begun:
        return lambda _truth: None

    def check(ground_truth: str) -> str | None:
        if ground_truth.strip() == "-":  # placeholder in rows for environments
            return (
                "'-' stands for no answer: where an environment gives the rewards set "
                "reward.function=bapo_megatron.environment:unjudged, else leave the row out"
            )
        if function == "math" and is_tests(ground_truth):  # math-verify would read a set of letters
            return "it holds the tests of a program; set reward.function=math_or_code"
        by_tests = function == "code" or is_tests(ground_truth)
        return (check_tests if by_tests else math.check_ground_truth)(ground_truth)

    return check


def extra_info_check(function: str) -> Callable[[dict[str, Any]], str | None] | None:
    """Return `reasoning_gym`'s check of ``extra_info``, which returns an error or None; None for others."""
    return check_extra_info if function == "reasoning_gym" else None


def prompt_fields_of(function: str) -> tuple[str, ...]:
    """Return the prompt fields that a built-in function reads."""
    return ("extra_info" if function == "reasoning_gym" else "ground_truth", "opens_thinking")


def built_in(reward: RewardConfig) -> BuiltIn:
    """Return a worker's built-in reward function, for calls in the main thread; the pool kills a worker that
    hangs. Raises ConfigError without reasoning-gym."""
    if reward.function == "reasoning_gym":
        tasks()  # imported before the memory is limited
        return lambda prompt, response: score(prompt["extra_info"], response)

    limits = (reward.memory_limit_mb, reward.code_case_limit_s, CODE_SHARE * reward.time_limit_s)

    def score_of(prompt: dict[str, Any], response: str) -> float:
        truth = prompt["ground_truth"]
        if reward.function == "code" or (reward.function == "math_or_code" and is_tests(truth)):
            return float(code.program_is_right(truth, response, *limits, reward.sandbox_url))
        from bapo_megatron.reward.math_verify_compare import equal

        return float(math.answer_is_right(truth, response, equal, reward.math_allow_operations))

    return score_of


def _unusable(target: Any) -> str | None:
    """Return the kind of a callable that returns no number (class, async function, generator), or None."""
    called = target
    while isinstance(called, partial):
        called = called.func
    if inspect.isclass(called):
        return "a class, whose calls make objects"
    if not inspect.isroutine(called):
        called = type(called).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        return "an async function"
    return "a generator function" if inspect.isgeneratorfunction(called) else None


def load_function(
    path: str, settings: Mapping[str, Any] | None = None, field: str = "reward.function"
) -> Score:
    """Import the user's ``package.module:function``, and return it with ``settings`` bound as keyword
    arguments. Raises ConfigError if that fails or it cannot be called as ``function(prompt, response)``."""
    settings = settings or {}
    function: Score = load_dotted_path(field, path, "function")
    expected = "a reward is called once for each response, as score(prompt: Prompt, response: str) -> float"
    if kind := _unusable(function):
        raise ConfigError(f"{field}={path} is {kind}; {expected}: make it a plain function")
    signature = inspect.signature(function)
    try:
        signature.bind("prompt", "response", **settings)
    except TypeError as error:
        raise ConfigError(
            f"{field}={path} is {signature}, which cannot be called with a prompt and a response ({error}); "
            f"{expected}; for verl's functions: docs/customize.md#files-of-verl-as-they-are"
        ) from error
    return partial(function, **settings) if settings else function
