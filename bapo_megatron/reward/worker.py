"""Reward worker process: scores responses for the pool, ``python -m bapo_megatron.reward.worker LIFELINE``.

Requests of the pool (pool.py) are lines of JSON. The first is the settings (`reward`, a `RewardConfig` as an
object, and `functions`, all reward functions), or null for a process that only compares answers
(math_verify_process.py); its reply is notes for the user. Every further line is one response and its reward
function; the reply is the score.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.reward import functions, math_verify_compare
from bapo_megatron.reward.answer_text import THINKING
from bapo_megatron.reward.penalties import format_penalty
from bapo_megatron.reward.sandbox.isolation import be_untraceable
from bapo_megatron.reward.sandbox.requirements import checked_sandbox
from bapo_megatron.runtime.processes import die_with_parent
from bapo_megatron.runtime.stop_signals import SIGNALS
from bapo_megatron.types import Prompt

Answerer = Callable[[dict[str, Any]], Any]

DETAIL_CHARACTERS = 500
"""Longest text of an error in a reply."""

TRACEBACK_CHARACTERS = 4000
"""Longest traceback in a reply; of a longer one the middle is left out."""


def main() -> None:
    """Entry point: serve requests until the input ends."""
    die_with_parent(int(sys.argv[1]))
    be_untraceable()  # it holds the answers
    for number in SIGNALS:  # told to every process of a job: the trainer's business
        signal.signal(number, lambda *_: None)
    questions, answers = _private_channel()
    try:
        notes, answer = _prepared(json.loads(questions.readline()))
    except ConfigError as error:
        _send(answers, {"problem": str(error)})
        return
    _send(answers, {"notes": notes})
    for line in questions:
        _send(answers, answer(json.loads(line)))


def _private_channel() -> tuple[BinaryIO, BinaryIO]:
    """Private descriptors of requests and replies: what a reward function prints goes to stderr instead."""
    questions, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return open(questions, "rb"), open(answers, "wb")  # for as long as the process lives


def _send(answers: BinaryIO, answer: object) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _prepared(settings: dict[str, Any] | None) -> tuple[list[str], Answerer]:
    """Import what the settings need, then limit the memory: notes and the scorer. ConfigError."""
    notes: list[str] = []
    answer: Answerer = _compare
    reward, names = RewardConfig(), [RewardConfig().function]
    if settings is not None:
        reward, names = RewardConfig(**settings["reward"]), settings["functions"]
        answer = _scorer(reward, names)
        notes = checked_sandbox(reward.allow_weak_sandbox) if functions.needs_sandbox(reward, names) else []
    if {"math", "math_or_code"} & set(names):
        math_verify_compare.import_math_verify()
    _limit_memory(reward.memory_limit_mb)
    return notes, answer


def _limit_memory(megabytes: int) -> None:
    """Limit the address space to what is mapped now plus ``megabytes``: libraries map more than they use."""
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = present + (megabytes << 20)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# --- answers -------------------------------------------------------------------------------------


def _compare(question: dict[str, list[Any]]) -> bool:
    [(function, arguments)] = question.items()
    answer: bool = _COMPARISONS[function](*arguments)
    return answer


_COMPARISONS: dict[str, Callable[..., bool]] = {
    "equal": math_verify_compare.equal,
    "parses": math_verify_compare.parses,
    "is_operation": math_verify_compare.is_operation,
}


def _scorer(reward: RewardConfig, names: list[str]) -> Answerer:
    """Scorer: from {function, prompt, response} to {score, reward}, or to {failure, detail}."""
    scores = {name: _score_function(functions.settings_for(reward, name)) for name in names}
    pattern = None if reward.format_pattern is None else re.compile(reward.format_pattern, re.DOTALL)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        response = question["response"]
        try:
            value = scores[question["function"]](question["prompt"], response)
        except BaseException as error:  # SystemExit too: a user's function does not end the worker
            return {"failure": "raised", **described(error)}
        number = _finite(value)
        if number is None:
            kind = type(value).__name__
            return {"failure": "not finite", "detail": _text_of(value), "place": kind}
        penalty = format_penalty(response, pattern, reward.format_penalty)
        return {"score": number, "reward": number - penalty}

    return answer


def described(error: BaseException) -> dict[str, str]:
    """Description of an error: ``detail`` (one line), ``traceback`` (from the reward function on), ``place``.

    ``place``, the type and the line that raised, is the same for all errors of one mistake.
    """
    kind, frames = type(error).__name__, error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        stack = traceback.extract_tb(frames, limit=-1)
        place = f"{kind} at {stack[0].filename}:{stack[0].lineno}" if stack else kind
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # no memory is left, or the error cannot be shown
        place, text = kind, kind
    return {"detail": _text_of(error), "traceback": shortened(text), "place": place}


def shortened(text: str) -> str:
    """``text`` without control characters, and without its middle if it is long."""
    half = TRACEBACK_CHARACTERS // 2
    if len(text) > TRACEBACK_CHARACTERS:
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
    # A message may quote the response: what the model wrote must not reach a terminal as it is.
    return printable(text.strip())


def _text_of(value: object) -> str:
    try:
        return repr(value)[:DETAIL_CHARACTERS]
    except Exception:  # a user's class may fail at it
        return type(value).__name__


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _score_function(reward: RewardConfig) -> Callable[[dict[str, Any], str], Any]:
    if functions.is_built_in(reward.function):
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
