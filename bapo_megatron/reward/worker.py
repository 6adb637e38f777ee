"""Reward worker: a child process that scores responses (for pool.py) or compares math answers (for math.py).

    python -m bapo_megatron.reward.worker LIFELINE      (LIFELINE: fd of a pipe that closes with the parent)

The parent sends the settings, then calls, as JSON lines (``workers/serving.py``). The settings are
``reward``, a `RewardConfig` as an object, and ``functions``, the names of all reward functions. The call
``score`` takes {function, prompt, response} and returns a failure or {score, reward, named}, where ``reward``
is the score less the format penalty. With null settings the calls are ``equal``, ``parses`` and
``is_operation`` of math_verify_compare.py.
"""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bapo_megatron.algo.advantages import LARGEST_REWARD
from bapo_megatron.config import RewardConfig
from bapo_megatron.config.validation import REWARD_FUNCTIONS
from bapo_megatron.reward import functions
from bapo_megatron.reward.answer_text import THINKING
from bapo_megatron.reward.sandbox.isolation import be_untraceable
from bapo_megatron.reward.sandbox.sandbox import checked_sandbox
from bapo_megatron.types import Prompt
from bapo_megatron.workers.serving import Prepared, serve, text_of


def main() -> None:
    """Entry point: serve calls until the input ends."""
    be_untraceable()  # holds the answers
    serve(_prepared)


def _prepared(settings: dict[str, Any] | None) -> Prepared:
    if settings is None:
        return Prepared(_comparisons(), RewardConfig().memory_limit_mb)
    reward, names = RewardConfig(**settings["reward"]), settings["functions"]
    score = _scorer(reward, names)
    notes = checked_sandbox(reward.allow_weak_sandbox) if functions.needs_sandbox(reward, names) else []
    if {"math", "math_or_code"} & set(names):
        _comparisons()  # imported before the memory is limited
    return Prepared({"score": score}, reward.memory_limit_mb, notes, own_files=(__file__,))


COMPARISON_CPU_LIMIT_S = 8
"""CPU time limit of a comparison in seconds, after which the kernel ends this process: four times the limit
in ``math_verify_compare.py``, which cannot interrupt an operation on big integers."""


def _limited(compare: Callable[..., bool]) -> Callable[[list[Any]], bool]:
    def answer(arguments: list[Any]) -> bool:
        used_s, most = math.ceil(time.process_time()), resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + COMPARISON_CPU_LIMIT_S, most))
        return compare(*arguments)

    return answer


def _comparisons() -> dict[str, Callable[[list[Any]], bool]]:
    """Return the comparison functions by name, and turn off all logging: math-verify logs bad answers."""
    from bapo_megatron.reward.math_verify_compare import equal, is_operation, parses

    logging.disable(logging.CRITICAL)
    return {function.__name__: _limited(function) for function in (equal, parses, is_operation)}


def _scorer(reward: RewardConfig, names: list[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    scores = {name: _score_function(functions.settings_for(reward, name)) for name in names}
    pattern = None if reward.format_pattern is None else re.compile(reward.format_pattern, re.DOTALL)
    is_fresh = True

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal is_fresh
        response = question["response"]
        try:
            value = scores[question["function"]](question["prompt"], response)
        except MemoryError:
            if not is_fresh:  # earlier calls may have filled the memory: the pool repeats it in a new process
                os._exit(1)
            raise
        finally:
            is_fresh = False
        named = {str(name): _finite(part) for name, part in value.items()} if isinstance(value, dict) else {}
        number = _finite(value if not named else None if None in named.values() else sum(named.values()))
        if number is None:
            kind = type(value).__name__
            return {"failure": "not finite", "detail": text_of(value), "place": kind}
        # A pattern may include or omit the thinking tag that the chat template opened.
        forms = [response, *([THINKING + response] if question["prompt"].get("opens_thinking") else [])]
        fits = pattern is None or any(map(pattern.fullmatch, forms))  # may never end, see config
        penalty = 0.0 if fits else reward.format_penalty
        return {"score": number, "reward": number - penalty, "named": named}

    return answer


def _finite(value: Any) -> float | None:
    if isinstance(value, (str, bytes)):  # float() would accept them
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST_REWARD else None  # nan is not


def _score_function(reward: RewardConfig) -> Callable[[dict[str, Any], str], Any]:
    if reward.function in REWARD_FUNCTIONS:
        score_of = functions.built_in(reward)

        def judge(prompt: dict[str, Any], response: str) -> float:
            opened = THINKING if prompt["opens_thinking"] else ""  # by the chat template
            share = score_of(prompt, opened + response)
            if share in (0, 1):
                return reward.correct if share else reward.wrong
            return reward.wrong + share * (reward.correct - reward.wrong)

        return judge
    users = functions.load_function(reward.function, reward.settings)

    def score(prompt: dict[str, Any], response: str) -> Any:
        ids = np.array(prompt["token_ids_P"], np.int32)
        return users(Prompt(**{**prompt, "token_ids_P": ids}), response)

    return score


if __name__ == "__main__":
    main()
