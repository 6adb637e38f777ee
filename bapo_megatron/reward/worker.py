"""A process that judges responses: ``python -m bapo_megatron.reward.worker``, see pool.py and child.py.

The first line is the settings (`RewardConfig` as an object), or null for a comparer of answers (judge.py);
the answer is notes for the user. Every further line is a question with one answer.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward import functions
from bapo_megatron.reward import math_verify_compare as comparison
from bapo_megatron.reward.penalties import format_penalty
from bapo_megatron.reward.sandbox.sandbox import Sandbox, SandboxError
from bapo_megatron.runtime.processes import die_with_parent

Answerer = Callable[[dict[str, Any]], Any]

DETAIL_CHARACTERS = 500
"""Of an error's text."""


def main() -> None:
    """Serve questions until the input ends."""
    die_with_parent(int(sys.argv[1]))
    for number in (signal.SIGUSR1, signal.SIGTERM):  # told to every process of a job: the trainer's business
        signal.signal(number, lambda *_: None)
    questions, answers = _private_channel()
    try:
        notes, answer = _prepared(json.loads(questions.readline()))
    except (ConfigError, SandboxError) as error:
        _send(answers, {"problem": str(error)})
        return
    _send(answers, {"notes": notes})
    for line in questions:
        _send(answers, answer(json.loads(line)))


def _private_channel() -> tuple[BinaryIO, BinaryIO]:
    """Descriptors that nothing else knows: what a reward prints goes to stderr and cannot be an answer."""
    questions, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return open(questions, "rb"), open(answers, "wb")  # for as long as the process lives


def _send(answers: BinaryIO, answer: object) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _prepared(settings: dict[str, Any] | None) -> tuple[list[str], Answerer]:
    """Import all that is needed, then limit the memory. Raises ConfigError or SandboxError."""
    notes: list[str] = []
    answer: Answerer = _compare
    reward = RewardConfig(**(settings or {}))
    if settings is not None:
        answer = _scorer(reward)
        notes = _sandbox_notes() if functions.runs_code(reward.function) else []
    if reward.function in ("math", "math_or_code"):
        comparison.prepare()
    _limit_memory(reward.memory_limit_mb)
    return notes, answer


def _limit_memory(megabytes: int) -> None:
    """Beside what the process has now: libraries take address space that they do not use."""
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = present + (megabytes << 20)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _sandbox_notes() -> list[str]:
    """Run a program in a sandbox, so that a machine without one is seen at once."""
    with Sandbox("print(input())", "", memory_mb=1024, case_limit_s=20.0) as sandbox:
        ended = sandbox.run("seen", limit_s=20.0)
        if ended is None or ended.output != "seen\n":
            raise SandboxError(f"the sandbox for code rewards does not work on this machine: {ended}")
        return sandbox.notes


# --- answers -------------------------------------------------------------------------------------


def _compare(question: dict[str, Any]) -> bool:
    if "answer" in question:
        return comparison.equal(question["ground_truth"], question["answer"])
    return comparison.parses(question["ground_truth"])


def _scorer(reward: RewardConfig) -> Answerer:
    """What answers {prompt, response} with {reward} or {failure, detail}."""
    judge = _judge_of(reward)
    pattern = None if reward.format_pattern is None else re.compile(reward.format_pattern, re.DOTALL)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        response = question["response"]
        try:
            value = judge(question["prompt"], response)
        except BaseException as error:  # SystemExit too: a user's function does not end the worker
            return {"failure": "raised", "detail": repr(error)[:DETAIL_CHARACTERS]}
        number = _finite(value)
        if number is None:
            return {"failure": "not finite", "detail": repr(value)[:DETAIL_CHARACTERS]}
        penalty = format_penalty(response, pattern, reward.format_penalty)
        return {"score": number, "reward": number - penalty}

    return answer


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _judge_of(reward: RewardConfig) -> Callable[[dict[str, Any], str], Any]:
    if functions.is_built_in(reward.function):
        is_right = functions.built_in(reward)
        return lambda prompt, response: (
            reward.correct if is_right(prompt["ground_truth"], response) else reward.wrong
        )
    score = functions.load_function(reward.function)

    import numpy as np

    from bapo_megatron.types import Prompt  # with torch, which a built-in function can do without

    def judge(prompt: dict[str, Any], response: str) -> Any:
        ids = np.array(prompt["token_ids_P"], np.int32)
        return score(Prompt(**{**prompt, "token_ids_P": ids}), response)

    return judge


if __name__ == "__main__":
    main()
