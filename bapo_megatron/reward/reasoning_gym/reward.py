"""The reward ``reasoning_gym``: an answer is scored by the verifier of its problem's task.

The verifiers are the library's code; a reward worker calls them in its main thread, with a limit of CPU
time. Used by ``data/prepare/generator.py`` and ``reward/functions.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.reasoning_gym.answer import answer_of, is_number
from bapo_megatron.reward.reasoning_gym.cpu_limit import OutOfTime, cpu_limit
from bapo_megatron.reward.reasoning_gym.evaluated_answers import is_harmless, unsafe_entry
from bapo_megatron.reward.reasoning_gym.library import check_task, verifier

NO_ANSWER = "judged by its verifier"
"""Ground truth of a problem with many right answers, none of which reasoning-gym gives."""

CPU_LIMIT_S = 5.0
"""CPU time limit of a verifier, in seconds: sympy may take minutes. Honest answers need less than 0.5 s."""

_RIGHT = 1 - 1e-9
"""Scores from here on count as 1: some are sums of rounded parts."""

_NEAR = 1e-4
"""Tolerance of coin_flip's verifier."""


def extra_info_of_entry(task: str, settings: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, str]:
    """Fields of a row for the verifier, as texts: Arrow gives objects the keys of all other rows."""
    kept = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return {
        "task": task,
        "settings": json.dumps(settings, sort_keys=True),
        "entry": json.dumps(kept, default=str, ensure_ascii=False),
    }


def check_extra_info(extra_info: Mapping[str, Any]) -> str | None:
    """Error of a row by which no response can be scored, or None."""
    missing = [name for name in ("task", "settings", "entry") if not isinstance(extra_info.get(name), str)]
    if missing:
        return (
            f"extra_info.{missing[0]} is missing, by which reward.function=reasoning_gym scores: make such "
            f"rows by `bapo data prepare reasoning-gym:TASK`, or set another reward.function"
        )
    try:
        check_task(extra_info["task"])
        verifier(extra_info["task"], extra_info["settings"])
        entry = _entry(extra_info)
    except (ConfigError, ValueError, TypeError, AssertionError, KeyError) as error:
        return f"extra_info is none of reasoning-gym's: {error}"
    return unsafe_entry(extra_info["task"], entry)


def score(extra_info: Mapping[str, Any], response: str) -> float:
    """Score of a response, in [0, 1]; 0 if the verifier cannot read the answer, or runs out of time.

    A number that merely contains the right one (115 for 15), for which most verifiers give a part, gets 0.
    """
    task = extra_info["task"]
    judge, entry = verifier(task, extra_info["settings"]), _entry(extra_info)
    expected = entry["answer"]
    answer = answer_of(response, expected)
    if answer is None or not is_harmless(task, answer):
        return 0.0
    try:
        with cpu_limit(CPU_LIMIT_S):
            found = float(judge(answer, entry))
    except (OutOfTime, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError):
        return 0.0
    if found < _RIGHT and is_number(expected) and is_number(answer) and _contains(answer, expected, found):
        return 0.0
    if task == "coin_flip" and found > 0 and not _is_near(answer, str(expected)):
        return 0.0
    return 1.0 if found >= _RIGHT else max(0.0, found)


def _is_near(answer: str, expected: str) -> bool:
    """Whether two probabilities are equal but for the verifier's tolerance: it also pays for equal first
    characters, so that a bare 0 would be right for every problem."""
    given, wanted = (float(Fraction(text.replace(",", ""))) for text in (answer, expected))
    return abs(given - wanted) <= _NEAR


def _contains(answer: str, expected: str, found: float) -> bool:
    """Whether a score is that of a text which contains the expected one."""
    given, wanted = answer.replace(",", ""), expected.replace(",", "")
    return wanted in given and found == len(wanted) / len(given)


def _entry(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Fresh copy of the problem's entry: some verifiers write into it."""
    entry: dict[str, Any] = json.loads(extra_info["entry"])
    if extra_info["task"] in ("arc_agi", "rearc"):  # it compares with tuples
        entry["metadata"]["output"] = tuple(map(tuple, entry["metadata"]["output"]))
    return entry
