"""Regular expressions over foreign texts take time linear in the text: a policy, a dataset or a server may write
a million blanks, line breaks, braces or digits.

Processor time, with a margin of hundreds: a quadratic expression needs seconds where a linear one needs a
millisecond.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator

import pytest

import bapo_megatron.data
import bapo_megatron.environment
import bapo_megatron.evaluation
import bapo_megatron.reward
from bapo_megatron.data.prepare.normal_form import answer_text, commuted_key
from bapo_megatron.data.prepare.problems import problem_of
from bapo_megatron.environment.tools.calls import tool_calls, without_calls
from bapo_megatron.reward.answer_text import final_answer, named_operations, spelled
from bapo_megatron.reward.code import last_code_block, same_output
from bapo_megatron.reward.math import answer_is_right, check_ground_truth
from bapo_megatron.reward.reasoning_gym import answer_of

LONG, SHORT = 1_000_000, 10_000

OPENINGS = (
    *("", "1", "a", "\n#### a", "\\boxed{", "\\text{", "\\sqrt(", "√(", "\\underline{", "def a", "```", "<answer>"),
    *("<tool_call>", "<tool_call><function=a>", "<function=a><parameter=b>", "<parameter=", '"', "1 + 1", "aa bb"),
    *("Solve the following math problem step by step.\n", "please ", "Let's think", "\\frac{", "(i", "1:", "[{"),
)
REPEATED = (
    *(" ", "\n", "\t", " \n", "a", "A", "1", "1,", ",111", " 000", "\\ ", "\\,", "\\", "{", "}", "{}", "(", "()", "$"),
    *("*", ".", "'", "/", "=", "-", "<", "`", "```\n", "\\text{", "\\boxed{", "<answer>", "<tool_call>", "\n####"),
    *("\n#### a", "please ", "\ndef a", "√(", "\\sqrt(", " + 1", " . 1", "aa ", "aa, ", "1.", "\\frac", '"\\', "[{"),
)
CLOSINGS = ("", "!", "x1")


def texts(length: int, openings: tuple[str, ...] = OPENINGS) -> Iterator[str]:
    """An opening, one text again and again, and a closing at which an expression may fail."""
    for opening in openings:
        for repeated in REPEATED:
            for closing in CLOSINGS:
                yield opening + repeated * (length // len(repeated)) + closing


def patterns() -> dict[str, re.Pattern[str]]:
    """All compiled expressions on text of the packages that read what others wrote."""
    found = {}
    for package in (bapo_megatron.data, bapo_megatron.environment, bapo_megatron.evaluation, bapo_megatron.reward):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".adapters." in module.name:  # their packages may be absent
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
                    found[value.pattern] = (f"{module.name.removeprefix('bapo_megatron.')}.{name}", value)
    return dict(found.values())


PATTERNS = patterns()


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def test_the_expressions_are_found() -> None:
    assert {"reward.math._PROGRAM", "data.prepare.problems._GSM8K", "reward.code._NUMBER"} <= PATTERNS.keys()
    assert len(PATTERNS) > 60


@pytest.mark.parametrize("name", PATTERNS)
def test_an_expression_takes_linear_time(name: str) -> None:
    pattern = PATTERNS[name]
    for text in texts(SHORT):
        taken = seconds(lambda text=text: (pattern.fullmatch(text), sum(1 for _ in pattern.finditer(text))))
        assert taken < 0.4, f"{text[:40]!r} ... {text[-20:]!r}"
