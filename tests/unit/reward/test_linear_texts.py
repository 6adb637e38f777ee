"""Regular expressions over foreign texts take linear time: a policy, a dataset or a server may write a
million blanks, line breaks, braces or digits.

Processor time, with a margin of hundreds: a quadratic expression needs seconds where a linear one needs a
millisecond.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import bapo_megatron.data
import bapo_megatron.environment
import bapo_megatron.evaluation
import bapo_megatron.reward
from bapo_megatron.data.prepare.filters import scorable
from bapo_megatron.data.prepare.problems import problem_of
from bapo_megatron.environment.tools.calls import tool_calls, without_calls
from bapo_megatron.reward.answer_text import final_answer, named_operations, spelled
from bapo_megatron.reward.code import last_code_block, same_output
from bapo_megatron.reward.math import answer_is_right, check_ground_truth
from bapo_megatron.reward.reasoning_gym import answer_of

LONG, SHORT = 1_000_000, 20_000

OPENINGS = (
    *("", "1", "a", "\n#### a", "\\boxed{", "\\text{", "\\sqrt(", "√(", "\\underline{", "def a", "```"),
    *("<answer>", "<tool_call>", "<tool_call><function=a>", "<function=a><parameter=b>", "<parameter=", '"'),
    *("Solve the following math problem step by step.\n", "please ", "Let's think", "\\frac{", "(i", "1:"),
    *("1 + 1", "aa bb", "[{"),
)
REPEATED = (
    *(" ", "\n", "\t", " \n", "a", "A", "1", "1,", ",111", " 000", "\\ ", "\\,", "\\", "{", "}", "{}", "("),
    *("()", "$", "*", ".", "'", "/", "=", "-", "<", "`", "```\n", "\\text{", "\\boxed{", "<answer>"),
    *("<tool_call>", "\n####", "\n#### a", "please ", "\ndef a", "√(", "\\sqrt(", " + 1", " . 1", "aa "),
    *("aa, ", "1.", "\\frac", '"\\', "[{"),
)
BLANKS = (" ", "\n", "a", "1", "{", "\\ ")


def texts(length: int) -> Iterator[str]:
    """An opening, one text again and again, and a sign at which an expression fails."""
    for repeated in REPEATED:
        yield repeated * (length // len(repeated)) + "!"
    for opening in OPENINGS:
        for repeated in BLANKS:
            yield opening + repeated * (length // len(repeated)) + "!"


PACKAGES = (bapo_megatron.data, bapo_megatron.environment, bapo_megatron.evaluation, bapo_megatron.reward)


def patterns() -> dict[str, tuple[re.Pattern[str], bool]]:
    """Compiled expressions of the packages that read what others wrote, and whether each is searched for:
    most are only held against the beginning of a text, or all of it."""
    found = {}
    for package in PACKAGES:
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".adapters." in info.name:  # their packages may be absent
                continue
            module = importlib.import_module(info.name)
            source = Path(str(module.__file__)).read_text()
            for name, value in vars(module).items():
                if isinstance(value, re.Pattern) and f"\n{name} = " in source:
                    searched = re.search(rf"\b{name}\.(?:search|finditer|findall|sub|split)\b", source)
                    found[f"{info.name.removeprefix('bapo_megatron.')}.{name}"] = value, searched is not None
    return found


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
    pattern, is_searched = PATTERNS[name]
    for text in texts(SHORT):
        work = partial(pattern.findall if is_searched else pattern.fullmatch, text)
        taken = seconds(work)
        assert taken < 0.25 or seconds(work) < 0.25, f"{text[:40]!r} ... {text[-20:]!r}"


READERS: dict[str, Callable[[str], object]] = {
    "math": lambda text: answer_is_right("34", text),
    "truth": check_ground_truth,
    "box": final_answer,
    "code": last_code_block,
    "reasoning_gym": lambda text: answer_of(text, "5"),
    "tool_calls": lambda text: (tool_calls(text), without_calls(text)),
    "row": lambda text: problem_of({"problem": f"a{text}", "answer": f"1{text}"}, "test", 0),
    "answer": lambda text: (spelled(text), named_operations(text)),
    "output": lambda text: same_output(text, "1.0"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "text",
    [
        *(" " * LONG, "\n" * LONG, "{" * LONG, "1" * LONG, "`" * LONG, "\\" * LONG + " \\boxed{1}"),
        *("\\text{" * (LONG // 6), "\\boxed{" * (LONG // 7), "```\n" * (LONG // 4), "```" + " " * LONG),
        *("```python\n" * (LONG // 10), "a\n#### 1" + " " * LONG + "x", '{"a": "</think>' * (LONG // 15)),
        *("<tool_call><function=a>" + "<parameter=b>" * (LONG // 13), "<tool_call>{</think>" * (LONG // 20)),
    ],
    ids=lambda text: repr(text[:8] + text[-8:]),
)
def test_a_megabyte_is_read_in_seconds(name: str, text: str) -> None:
    assert seconds(lambda: READERS[name](text)) < 20  # quadratic would be hours


@pytest.mark.parametrize("braces", ["\\text{" * 150_000 + "}" * 150_000, "\\text{a}" * 100_000])
def test_a_long_truth_is_searched_for_sentences_in_its_beginning(braces: str) -> None:
    """Each level of braces is a pass of its own."""
    problem = problem_of({"problem": "a", "answer": braces}, "test", 0)
    assert seconds(lambda: scorable("math")(problem)) < 20
