"""Reward ``reasoning_gym``: scores a response with the library's verifier for the problem's task.

``score(extra_info, response)`` returns a number in [0, 1]. Call it in the main thread of a reward worker: a
signal limits CPU time. Nine verifiers call ``eval``, or sympy's ``parse_expr``, on the answer, and five on a
text of the problem. Such a text must first be a literal, or consist of numbers, operators and known
functions; otherwise the answer scores 0 (``is_harmless``), or the row is invalid (``unsafe_entry``). Also
checked are answers to verifiers that take unlimited time or memory for a large number, or accept ``nan``.

The library's import takes seconds and loads all tasks (``tasks``, ConfigError if it is not installed). One
task, zebra_puzzles, needs pycosat, and thus a C compiler, to generate problems.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from types import ModuleType
from typing import Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.answer_text import after_thinking, last_boxed
from bapo_megatron.reward.cpu_time import OutOfTime, cpu_limit

Verifier = Callable[[str, dict[str, Any]], Any]
"""Verifier of a task, its ``score_answer``: maps an answer and the problem's entry to a score."""

INSTALL = "pip install 'bapo-megatron[real]'"

UNUSABLE = {
    "composite": "it mixes other tasks: name those",
    "game_of_life_halting": "its verifier calls every answer right",
}

_COMPILED = "pycosat"
_NEED_COMPILED = "zebra_puzzles"


class _Absent(ModuleType):
    """Stand-in for pycosat while reasoning-gym is imported."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__}.{name}: {self.__name__} is not installed")


@cache
def tasks() -> Mapping[str, tuple[type, type]]:
    """Return problem and settings class of each usable task by name. Raises ConfigError if not installed."""
    absent = importlib.util.find_spec(_COMPILED) is None
    if absent:
        sys.modules[_COMPILED] = _Absent(_COMPILED)
    try:
        import reasoning_gym.factory
    except ImportError as error:
        raise ConfigError(f"reasoning-gym cannot be imported ({error}): {INSTALL}") from error
    finally:
        if absent:
            del sys.modules[_COMPILED]
    datasets = reasoning_gym.factory.DATASETS
    return {name: datasets[name] for name in sorted(datasets) if name not in UNUSABLE}


def check_task(name: str, generates: bool = False) -> None:
    """Raise ConfigError if task ``name`` is unusable or, with ``generates``, cannot generate problems."""
    if name in UNUSABLE:
        raise ConfigError(f"reasoning-gym's task {name} cannot be used: {UNUSABLE[name]}")
    if name not in tasks():
        raise ConfigError(f"reasoning-gym has no task {name!r}; it has {', '.join(tasks())}")
    if generates and name == _NEED_COMPILED and importlib.util.find_spec(_COMPILED) is None:
        raise ConfigError(
            f"the task {name} needs {_COMPILED}, which is compiled: with a C compiler and Python.h "
            f"(python3-dev) run pip install {_COMPILED}==0.6.6; its other tasks do not need it"
        )


@cache
def verifier(task: str, settings: str) -> Verifier:
    """Return a task's verifier for problems generated with ``settings``, a JSON object."""
    check_task(task)
    problems, options = tasks()[task]
    judge: Verifier = problems(config=options(**json.loads(settings))).score_answer  # type: ignore[attr-defined]
    return judge


MAX_CHARACTERS = 20_000
"""Maximum answer length in characters; a longer one is wrong."""

MAX_EVALUATED_CHARACTERS = 2_000

_MAX_POWER = 200
"""Maximum product of the exponents of brackets, which limits results to 720,000 digits."""

_ARITHMETIC = re.compile(r"(?:[\d\s.+/()-]|\*(?!\*))++")
"""Numbers, ``+ - * /`` and brackets."""
_FUNCTIONS = r"(?:Abs|acosh?|asinh?|atanh?|cosh?|cot|csc|exp|ln|log|sec|sinh?|sqrt|tanh?)\("
_SIZE = r"(?:1?\d?\d(?:\.\d{1,3})?|200)"
_POWER = rf"\*\*\s*+(?:-?{_SIZE}|\(-?{_SIZE}(?:/\d{{1,3}})?\)|[A-Za-z])(?!\s*+\*\*|\s*+\(|[\w.])"
"""A power with a plain number, fraction or letter as the exponent: ``9**9**9`` is none."""
_ALGEBRA = re.compile(
    rf"(?:{_FUNCTIONS}|(?:pi|[A-Za-z])(?!\w|\s*+\()|\d{{1,18}}+(?:\.\d{{0,18}}+)?(?![\w.]|\s*+\()"
    rf"|{_POWER}|\*(?!\*)|[\s+/(-]|\)(?!\s*+\())++"
)
"""Also powers, letters and functions, but no attribute and no call of anything else. Not ``Integral``: the
derivative of ``Integral(f, x)`` is ``f``."""
_POWER_OF_BRACKETS = re.compile(r"\)\s*+\*\*[\s(-]*+(\d++)")
_HEX_ARITHMETIC = re.compile(r"(?:0x[0-9a-f]{1,4}|(?:<<|>>) 0x[0-3](?![0-9a-f])|\*(?!\*)|[-+() ])*")
"""The generated form: no power, no shift by more than three bits."""
_LARGE_NUMBER = re.compile(r"\d{3}")
_EXPONENT = re.compile(r"\d[eE]")
_NO_NUMBER = re.compile(r"nan|inf", re.IGNORECASE)


def is_harmless(task: str, answer: str) -> bool:
    """Whether an answer may reach the verifier of ``task``; otherwise it is wrong."""
    if len(answer) > MAX_CHARACTERS or "\0" in answer:
        return False
    check = _ANSWERS.get(task)
    return check is None or (len(answer) <= MAX_EVALUATED_CHARACTERS and check(answer))


def unsafe_entry(task: str, entry: Mapping[str, Any]) -> str | None:
    """Return the error of a problem whose text is unsafe to evaluate, or None: rows may be anyone's."""
    if task not in _ENTRIES:
        return None
    name, check = _ENTRIES[task]
    text = entry["answer"] if name == "answer" else entry["metadata"].get(name)
    if isinstance(text, str) and len(text) <= MAX_CHARACTERS and check(text):
        return None
    return f"extra_info.entry has the {name} {text!r:.80}, which {task}'s verifier would evaluate"


def _is_value(text: str) -> bool:
    """Whether evaluating the text gives a literal or the value of a name, or is an error of syntax."""
    if text.isidentifier():
        return True
    try:
        ast.literal_eval(text)
    except SyntaxError:
        return True
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_arithmetic(text: str) -> bool:
    return _ARITHMETIC.fullmatch(text) is not None


def _is_algebra(text: str) -> bool:
    powers = map(int, _POWER_OF_BRACKETS.findall(text))
    return _ALGEBRA.fullmatch(text) is not None and math.prod(powers) <= _MAX_POWER


_ANSWERS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _is_value),
    **dict.fromkeys(("countdown", "puzzle24"), _is_arithmetic),
    **dict.fromkeys(
        ("intermediate_integration", "polynomial_multiplication", "simple_integration"), _is_algebra
    ),
    **dict.fromkeys(("rubiks_cube", "rush_hour"), lambda answer: not _LARGE_NUMBER.search(answer)),
    "coin_flip": lambda answer: not _EXPONENT.search(answer),  # 1e999999999 as a fraction
    "complex_arithmetic": lambda answer: not _NO_NUMBER.search(answer),  # min(1, nan) is 1
    "propositional_logic": lambda _: True,  # parsed, so must be short
}
_ENTRIES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "bitwise_arithmetic": ("problem", lambda text: _HEX_ARITHMETIC.fullmatch(text) is not None),
    "intermediate_integration": ("integrand", _is_algebra),
    "number_sorting": ("answer", _is_value),
    "polynomial_multiplication": ("answer", _is_algebra),
    "simple_integration": ("integrand", _is_algebra),
}


_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
"""Answer form that reasoning-gym's own prompts request."""

_NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-+])?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?|(?<!\d)\.\d+"
)
"""Number with sign (not after a digit or bracket: ``5-3``), thousands, decimals, exponent, denominator."""


def answer_of(response: str, expected: object) -> str | None:
    r"""Return the answer after the thinking part: the last ``<answer>``, else the last ``\boxed{}``, else the
    last number if a number is ``expected`` (``7 + 8 = 15`` means 15), else the whole text. None if empty."""
    text = after_thinking(response)
    if tagged := _TAGGED.findall(text):
        return str(tagged[-1]).strip() or None
    if (boxed := last_boxed(text)) is not None:
        return boxed or None
    if is_number(expected):
        numbers = _NUMBER.findall(text.replace("\u2212", "-"))
        return numbers[-1] if numbers else None
    return text.strip() or None


def is_number(text: object) -> bool:
    """Whether the text is a single number."""
    return isinstance(text, str) and _NUMBER.fullmatch(text.strip()) is not None


NO_ANSWER = "judged by its verifier"
"""Ground truth of a problem with many right answers, none of which reasoning-gym provides."""

CPU_LIMIT_S = 5.0
"""CPU time limit of a verifier in seconds: sympy may take minutes. Correct answers need less than 0.5 s."""

_RIGHT = 1 - 1e-9
"""Scores from here on count as 1: some are sums of rounded parts."""

_NEAR = 1e-4
"""Tolerance of coin_flip's verifier."""


def extra_info_of_entry(task: str, settings: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, str]:
    """Return a row's verifier fields as text: Arrow would give objects the keys of all rows."""
    kept = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return {
        "task": task,
        "settings": json.dumps(settings, sort_keys=True),
        "entry": json.dumps(kept, default=str, ensure_ascii=False),
    }


def check_extra_info(extra_info: Mapping[str, Any]) -> str | None:
    """Return the error of a row that cannot score any response, or None."""
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
    """Return the score of a response in [0, 1]; 0 if the verifier cannot read the answer or runs out of time.
    A number that merely contains the right one (115 for 15) scores 0; most verifiers give it a part."""
    task = extra_info["task"]
    judge, entry = verifier(task, extra_info["settings"]), _entry(extra_info)
    expected = entry["answer"]
    answer = answer_of(response, expected)
    if answer is None or not is_harmless(task, answer):
        return 0.0
    try:
        with cpu_limit(CPU_LIMIT_S):
            result = float(judge(answer, entry))
    except (OutOfTime, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError):
        return 0.0
    if result < _RIGHT and is_number(expected) and is_number(answer) and _contains(answer, expected, result):
        return 0.0
    if task == "coin_flip" and result > 0 and not _is_near(answer, str(expected)):
        return 0.0
    return 1.0 if result >= _RIGHT else max(0.0, result)


def _is_near(answer: str, expected: str) -> bool:
    """Whether two probabilities agree within the verifier's tolerance. The verifier also rewards equal first
    characters, so a bare 0 would score on every problem."""
    actual, wanted = (float(Fraction(text.replace(",", ""))) for text in (answer, expected))
    return abs(actual - wanted) <= _NEAR


def _contains(answer: str, expected: str, result: float) -> bool:
    """Whether the score is the verifier's partial score for a text that contains the expected one."""
    said, wanted = answer.replace(",", ""), expected.replace(",", "")
    return wanted in said and result == len(wanted) / len(said)


def _entry(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fresh copy of the problem's entry: some verifiers write into it."""
    entry: dict[str, Any] = json.loads(extra_info["entry"])
    if extra_info["task"] in ("arc_agi", "rearc"):  # compared with tuples
        entry["metadata"]["output"] = tuple(map(tuple, entry["metadata"]["output"]))
    return entry
