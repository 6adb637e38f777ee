"""Code reward: whether the last code block after the thinking part passes every test of the problem.

A reward worker calls it; it starts a sandbox for each response, or takes a server. Expected outputs never
enter the sandbox, where tested code could read them: outputs and values are compared here. An assert without
a literal is split: the program's process gives the values of its calls, and the rest is evaluated in a
sandbox process that the program never ran in (expressions.py). Used by ``functions.py`` and
``environment/tools/python_tool.py``.
"""

from __future__ import annotations

import ast
import json
import math
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from bapo_megatron.reward.answer_text import after_thinking
from bapo_megatron.reward.code_tests import PRELUDE, Asserted, Called, Case, Printed, read_tests
from bapo_megatron.reward.expressions import Split
from bapo_megatron.reward.sandbox import plain
from bapo_megatron.reward.sandbox.fusion import FusionSandbox, FusionServer
from bapo_megatron.reward.sandbox.sandbox import Ended, Sandbox

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-9
"""Tolerances for numbers with a fraction or an exponent, where the text differs."""

MAX_SOURCE_CHARACTERS = 200_000
"""Limit in characters of a code block; a longer one is wrong without being run."""

JUDGED_TOGETHER = 10
"""Most asserts that are evaluated in one process, after their calls have run in one process each."""

_OPENING = re.compile(r"```(?:python3?|py)\s*", re.IGNORECASE)
_FRACTION = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")


def last_code_block(response: str) -> str | None:
    """Content of the last closed Python code block of the response, or None. One pass over the lines."""
    block: str | None = None
    lines: list[str] | None = None
    for line in response.split("\n"):
        text = line.strip()
        if _OPENING.fullmatch(text):
            lines = []
        elif lines is not None and text.startswith("```"):
            block, lines = "\n".join(lines), None
        elif lines is not None:
            lines.append(line)
    return block


def program_is_right(
    ground_truth: str,
    response: str,
    memory_mb: int,
    case_limit_s: float,
    total_limit_s: float,
    server: FusionServer | None = None,
) -> bool:
    """Whether all tests pass, each in ``case_limit_s`` and all together in ``total_limit_s``.

    ``server``: runs the programs in place of this machine. Raises ValueError for a ground truth that is no
    tests, SandboxError if there is no sandbox.
    """
    tests = read_tests(ground_truth)
    deadline = time.monotonic() + total_limit_s
    source = last_code_block(after_thinking(response))
    tree = None if source is None else _parsed(source)
    if source is None or tree is None:
        return False
    as_script = isinstance(tests.cases[0], Printed)
    prelude = tests.prelude if as_script else PRELUDE + tests.prelude
    opened = partial(FusionSandbox, server) if server else Sandbox
    with opened(source, prelude, memory_mb, case_limit_s) as sandbox:
        return _all_pass(tests.cases, tree, sandbox, deadline)


def _all_pass(cases: Sequence[Case], tree: ast.Module, sandbox: Sandbox, deadline: float) -> bool:
    """Whether all cases pass. Judgements come last: a later case could read them in its parent's memory."""
    said: list[tuple[Split, str]] = []
    for case in cases:
        if isinstance(case, Asserted) and case.split is not None:
            value = _values(case, case.split, sandbox, deadline - time.monotonic())
            if value is None:
                return False
            said.append((case.split, value))
        elif not _passes(case, tree, sandbox, deadline - time.monotonic()):
            return False
    batches = (said[first : first + JUDGED_TOGETHER] for first in range(0, len(said), JUDGED_TOGETHER))
    return all(_is_true(batch, sandbox, deadline - time.monotonic()) for batch in batches)


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source) if len(source) <= MAX_SOURCE_CHARACTERS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _values(case: Asserted, parts: Split, sandbox: Sandbox, limit_s: float) -> str | None:
    """Values of a case's calls, as JSON; None if they gave none."""
    calls = f"[{', '.join(parts.calls)}]"
    ended = None if limit_s <= 0 else sandbox.value(calls, limit_s, setup=case.setup, objects=True)
    return None if ended is None else ended.value


def _is_true(batch: Sequence[tuple[Split, str]], sandbox: Sandbox, limit_s: float) -> bool:
    """Whether all judgements hold for their values."""
    judgements = [(parts.judgement, values) for parts, values in batch]
    helpers = batch[0][0].helpers  # the same for all of a problem
    return limit_s > 0 and _value(sandbox.judge(judgements, limit_s, helpers)) is True


def _passes(case: Case, tree: ast.Module, sandbox: Sandbox, limit_s: float) -> bool:
    if limit_s <= 0:
        return False
    if isinstance(case, Printed):
        ended = sandbox.run(case.stdin, limit_s)
        return ended is not None and ended.code == 0 and same_output(ended.output, case.expected)
    if isinstance(case, Asserted):
        ended = sandbox.value(case.expression, limit_s, setup=case.setup, truth=not case.literal)
        return bool(_value(ended) == case.expected)
    ended = sandbox.value(f"{_callee(tree, case)}(*ARGUMENTS)", limit_s, arguments=case.arguments)
    value, expected = _value(ended), case.expected
    return same_value(value, expected) or (
        isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])
    )


def _callee(tree: ast.Module, case: Called) -> str:
    """The method of class Solution, if the source has one of that name, else the function."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Solution":
            names = (item.name for item in node.body if isinstance(item, ast.FunctionDef))
            if case.function in names:
                return f"Solution().{case.function}"
    return case.function


# --- comparing -----------------------------------------------------------------------------------


def same_output(output: str, expected: str) -> bool:
    """Comparison of printed output, line by line; trailing white space does not count.

    Where the text of a line differs, its words must be equal one by one, or numbers that are close, of which
    at least one is written with a fraction or an exponent.
    """
    ours, theirs = _lines(output), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    words = ours.split(), theirs.split()
    return len(words[0]) == len(words[1]) and all(map(_same_word, *words))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    numbers = all(_NUMBER.fullmatch(word) and len(word) < 100 for word in (ours, theirs))
    return numbers and any(map(_FRACTION.fullmatch, (ours, theirs))) and _close(float(ours), float(theirs))


def same_value(value: Any, expected: Any) -> bool:
    """Comparison of a value with expected JSON: tuples equal lists, keys are text, floats may be close."""
    if isinstance(expected, list):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(expected)
            and all(map(same_value, value, expected))
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        by_text = {str(key): item for key, item in value.items()}
        return by_text.keys() == expected.keys() and all(
            same_value(by_text[key], item) for key, item in expected.items()
        )
    if isinstance(value, float) or isinstance(expected, float):
        numbers = all(isinstance(number, (int, float)) for number in (value, expected))
        return numbers and (value == expected or _close(value, expected))
    return bool(value == expected)


def _close(ours: float, theirs: float) -> bool:
    try:
        return math.isclose(ours, theirs, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer beyond the floats
        return False


def _value(ended: Ended | None) -> Any:
    """Value of a case; an object that equals nothing if it gave none."""
    if ended is None or ended.value is None:
        return object()
    try:
        return plain.decoded(json.loads(ended.value))
    except Exception:  # tested code wrote it, whatever it is
        return object()
