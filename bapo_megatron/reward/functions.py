"""Registry of reward functions: what each name of ``reward.function`` needs, checks and computes.

A name is a built-in, an endpoint's or a dotted path. Preflight checks it here, loaders of data get the checks
of ground truths, and each worker process of the reward pool loads its functions (endpoints are asked by
``pool.py``). ConfigError for one that cannot be used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.config.validation import REWARD_ENDPOINTS, REWARD_FUNCTIONS
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward import code, math
from bapo_megatron.reward.code_tests import check_tests, is_tests
from bapo_megatron.reward.endpoint_settings import read_settings
from bapo_megatron.reward.reasoning_gym import check_extra_info, score, tasks
from bapo_megatron.reward.sandbox.fusion import FusionServer
from bapo_megatron.runtime.dotted_path import load_dotted_path

if TYPE_CHECKING:
    from bapo_megatron.types import Prompt

Score = Callable[["Prompt", str], float]

BuiltIn = Callable[[dict[str, Any], str], float]
"""A built-in reward function: from fields of a prompt and a response to a score in [0, 1]."""

CODE_SHARE = 0.9
"""Share of `reward.time_limit_s` for all tests of a response: a slow program is wrong, not a failure."""


def settings_for(reward: RewardConfig, function: str) -> RewardConfig:
    """Reward section for the ``function`` of a source: only `reward.function` has the `reward.settings`."""
    return reward if function == reward.function else replace(reward, function=function, settings={})


def check_function(reward: RewardConfig, field: str = "reward.function") -> None:
    """Preflight of the reward function: ConfigError if it cannot be loaded, or refuses its settings.

    ``field``: its name in the configuration, for messages.
    """
    if reward.function in REWARD_ENDPOINTS:
        read_settings(reward.function, reward.settings)
    elif reward.function not in REWARD_FUNCTIONS:
        load_function(reward.function, reward.settings, field)


def check_functions(config: RunConfig, functions: Iterable[str]) -> None:
    """``check_function`` of some of a run's reward functions, with their fields in messages."""
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
    """Validator of ground truths for a built-in function: the error of a text, or None.

    None for a user's function, which takes any. ``begun``: the run has steps, so that its ground truths were
    valid when it began: none is refused, since its files must stay as they are.
    """

    def check_math(ground_truth: str) -> str | None:
        if is_tests(ground_truth):  # which math-verify would read as a set of letters
            return "it holds the tests of a program; set reward.function=math_or_code"
        return math.check_ground_truth(ground_truth)

    def check_either(ground_truth: str) -> str | None:
        return (check_tests if is_tests(ground_truth) else math.check_ground_truth)(ground_truth)

    def check_one(ground_truth: str) -> str | None:
        if ground_truth.strip() == "-":  # of rows for environments
            return (
                "'-' stands for no answer: where an environment gives the rewards set "
                "reward.function=bapo_megatron.environment:unjudged, else leave the row out"
            )
        return of[function](ground_truth)

    of = {"math": check_math, "code": check_tests, "math_or_code": check_either}
    check = check_one if function in of else None
    return (lambda _truth: None) if begun and check else check


def extra_info_check(function: str) -> Callable[[dict[str, Any]], str | None] | None:
    """Validator of ``extra_info`` for a function that scores by it: its error, or None.

    None for a function that needs no ``extra_info``.
    """
    return check_extra_info if function == "reasoning_gym" else None


def prompt_fields_of(function: str) -> tuple[str, ...]:
    """Fields of a prompt that a built-in function reads."""
    return ("extra_info" if function == "reasoning_gym" else "ground_truth", "opens_thinking")


def built_in(reward: RewardConfig) -> BuiltIn:
    """Built-in reward function of a worker: call it in the main thread; it may hang, and is then killed.

    ConfigError if no server at `reward.sandbox_url` runs programs.
    """
    if reward.function == "reasoning_gym":
        tasks()  # imported before the memory is limited
        return lambda prompt, response: score(prompt["extra_info"], response)
    server = FusionServer(reward.sandbox_url) if reward.sandbox_url and runs_code(reward.function) else None
    if server:
        server.check()

    def math_is_right(ground_truth: str, response: str) -> bool:
        from bapo_megatron.reward.math_verify_compare import equal

        allow = reward.math_allow_operations
        return math.answer_is_right(ground_truth, response, equal, allow)

    def code_is_right(ground_truth: str, response: str) -> bool:
        total_s = CODE_SHARE * reward.time_limit_s
        return code.program_is_right(
            ground_truth, response, reward.memory_limit_mb, reward.code_case_limit_s, total_s, server
        )

    def either_is_right(ground_truth: str, response: str) -> bool:
        return (code_is_right if is_tests(ground_truth) else math_is_right)(ground_truth, response)

    is_right = {"math": math_is_right, "code": code_is_right, "math_or_code": either_is_right}[
        reward.function
    ]
    return lambda prompt, response: float(is_right(prompt["ground_truth"], response))


def _advice(name: str, signature: inspect.Signature) -> str:
    """Fix for a function with the wrong parameters, such as those that verl calls."""
    if {"data_source", "solution_str", "ground_truth"} <= signature.parameters.keys():
        return (
            f"verl calls such functions; wrap it: def score(prompt, response): return {name}("
            "prompt.data_source, response, prompt.ground_truth, prompt.extra_info) "
            "(docs/customize.md#files-of-verl-as-they-are)"
        )
    return "Change its parameters (docs/rewards.md#a-reward-of-your-own)"


def _unusable(target: Any) -> str | None:
    """Kind of an object whose calls give no number: a class, an async or a generator function; else None."""
    called = target
    while isinstance(called, partial):
        called = called.func
    if inspect.isclass(called):
        return None if hasattr(called, "__float__") else "a class, whose calls make objects"
    if not inspect.isroutine(called):
        called = type(called).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        return "an async function"
    return "a generator function" if inspect.isgeneratorfunction(called) else None


def load_function(
    path: str, settings: Mapping[str, Any] | None = None, field: str = "reward.function"
) -> Score:
    """Load the user's function ``package.module:function``, with its settings as keyword arguments.

    ConfigError if it cannot be imported, or cannot be called as ``function(prompt, response)``.
    """
    settings = settings or {}
    function: Score = load_dotted_path(field, path, "function")
    expected = "a reward is called once for each response, as score(prompt: Prompt, response: str) -> float"
    if kind := _unusable(function):
        raise ConfigError(
            f"{field}={path} is {kind}; {expected}, in a process of its own: make it a "
            f"plain function (docs/rewards.md#a-reward-of-your-own)"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions in C have none
        return partial(function, **settings) if settings else function
    try:
        signature.bind("prompt", "response", **settings)
    except TypeError as error:
        name = path.partition(":")[2]
        arguments = "a prompt, a response and reward.settings" if settings else "a prompt and a response"
        raise ConfigError(
            f"{field}={path} is {name}{signature}, which cannot be called with {arguments} ({error}); "
            f"{expected}. {_advice(name, signature)}"
        ) from error
    return partial(function, **settings) if settings else function
