"""Code reward: whether the last Python code block after the thinking part passes every test of a problem.

``program_is_right(ground_truth, response, ...)`` returns the verdict; it blocks. Runs in a reward worker, and
starts a sandbox per response or uses a SandboxFusion server. Expected outputs stay out of the program's
process, which could copy them: this module compares outputs and values. An assert without a literal is split:
that process returns the values of its calls, and one that never ran the program evaluates the rest
(expressions.py). An assert that cannot be split runs in the program's process, which may forge the result.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from bapo_megatron.reward.answer_text import after_thinking
from bapo_megatron.reward.code_tests import Asserted, Called, Case, Printed, read_names, read_tests
from bapo_megatron.reward.expressions import PRELUDE, Split, defined, names_of
from bapo_megatron.reward.sandbox import plain
from bapo_megatron.reward.sandbox.fusion import FusionSandbox
from bapo_megatron.reward.sandbox.sandbox import Ended, Sandbox

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-9
"""Tolerances for differently written numbers with a fraction or an exponent."""

MAX_SOURCE_CHARACTERS = 200_000
"""Maximum length of a code block in characters; a longer one is wrong and does not run."""

RECURSION_LIMIT = 50_000
"""Recursion limit of programs, as in LiveCodeBench."""

JUDGED_TOGETHER = 10
"""Maximum number of asserts evaluated in one process, after their calls have run in one process each."""

_FENCE = re.compile(r"([^\S\n]*+)(`{3,}+)(.*)", re.DOTALL)
_PYTHON = re.compile(r"\s*+\{?\.?(?:python|py)3?(?:\.\d++)*+(?![^\s,:;{}])[^`]*", re.IGNORECASE)
_BYTE_ORDER_MARK = "\ufeff"
_FRACTION = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")


def last_code_block(response: str) -> str | None:
    """Return the content of the last closed Python code block of the response, or None, in one pass. As in
    CommonMark, the first word after the backticks is the language, fewer backticks do not close a block, and
    each line loses the indentation of the opening fence."""
    block: str | None = None
    lines: list[str] | None = None
    indentation, ticks = "", 0
    for line in response.split("\n"):
        fence = _FENCE.match(line.lstrip(_BYTE_ORDER_MARK))
        if fence is None or (lines is not None and len(fence[2]) < ticks):
            if lines is not None:
                lines.append(_outdented(line, indentation))
        elif _PYTHON.fullmatch(fence[3]):
            lines, indentation, ticks = [], fence[1], len(fence[2])
        elif lines is not None:
            block, lines = "\n".join(lines).lstrip(_BYTE_ORDER_MARK), None
    return block


def _outdented(line: str, indentation: str) -> str:
    if line.startswith(indentation):
        return line[len(indentation) :]
    rest = line.lstrip(" \t")
    return line[min(len(line) - len(rest), len(indentation)) :]


def program_is_right(
    ground_truth: str,
    response: str,
    memory_mb: int,
    case_limit_s: float,
    total_limit_s: float,
    sandbox_url: str | None = None,
) -> bool:
    """Whether all tests pass, each within ``case_limit_s`` and all together within ``total_limit_s``. Both
    limits count CPU time and sleep. ``sandbox_url``: SandboxFusion server that runs the programs instead of
    this machine, by its own clock.
    Raises ValueError for a ground truth without valid tests, SandboxError for an unknown result."""
    tests = read_tests(ground_truth)
    source = last_code_block(after_thinking(response))
    tree = None if source is None else _parsed(source)
    if source is None or tree is None:
        return False
    as_script = isinstance(tests.cases[0], Printed)
    prelude = tests.prelude if as_script else PRELUDE + tests.prelude
    if not all(_is_defined(case, tree) for case in tests.cases):
        return False
    opened = partial(FusionSandbox, sandbox_url) if sandbox_url else Sandbox
    with opened(source, prelude, memory_mb, case_limit_s, recursion_limit=RECURSION_LIMIT) as sandbox:
        return _all_pass(tests.cases, tree, sandbox, total_limit_s)


def _all_pass(cases: Sequence[Case], tree: ast.Module, sandbox: Sandbox, total_limit_s: float) -> bool:
    """Whether all cases pass. Judgements run last: a later case could read them in its parent's memory."""
    said: list[tuple[Split, str]] = []
    for case in cases:
        if isinstance(case, Asserted) and case.split is not None:
            value = _values(case, case.split, sandbox, total_limit_s - sandbox.used_s)
            if value is None:
                return False
            said.append((case.split, value))
        elif not _passes(case, tree, sandbox, total_limit_s - sandbox.used_s):
            return False
    batches = (said[first : first + JUDGED_TOGETHER] for first in range(0, len(said), JUDGED_TOGETHER))
    return all(_is_true(batch, sandbox, total_limit_s - sandbox.used_s) for batch in batches)


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source) if len(source) <= MAX_SOURCE_CHARACTERS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_defined(case: Case, tree: ast.Module) -> bool:
    """Whether the program itself defines something that is tested, where the prelude has such names."""
    if isinstance(case, Called):
        return _callee(tree, case) != case.function or case.function in defined(tree)
    names = read_names(case)
    return not names.isdisjoint(defined(tree)) or names.isdisjoint(names_of(PRELUDE))


def _values(case: Asserted, parts: Split, sandbox: Sandbox, limit_s: float) -> str | None:
    calls = f"[{', '.join(parts.calls)}]"
    ended = None if limit_s <= 0 else sandbox.value(calls, limit_s, setup=case.setup, objects=True)
    return None if ended is None else ended.value


def _is_true(batch: Sequence[tuple[Split, str]], sandbox: Sandbox, limit_s: float) -> bool:
    judgements = [(parts.judgement, values) for parts, values in batch]
    helpers = batch[0][0].helpers  # shared by all cases of a problem
    return limit_s > 0 and _value(sandbox.judge(judgements, limit_s, helpers)) is True


def _passes(case: Case, tree: ast.Module, sandbox: Sandbox, limit_s: float) -> bool:
    if limit_s <= 0:
        return False
    if isinstance(case, Printed):
        ended = sandbox.run(case.stdin, limit_s)
        return ended is not None and ended.code == 0 and same_output(ended.output, case.expected)
    if isinstance(case, Asserted):
        kind = {"objects": True} if case.literal else {"truth": True}
        ended = sandbox.value(case.expression, limit_s, setup=case.setup, **kind)
        return bool(_value(ended) == case.expected)
    ended = sandbox.value(f"{_callee(tree, case)}(*ARGUMENTS)", limit_s, arguments=case.arguments)
    value, expected = _value(ended), case.expected
    return same_value(value, expected) or (
        isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])
    )


def _callee(tree: ast.Module, case: Called) -> str:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Solution":
            names = (item.name for item in node.body if isinstance(item, ast.FunctionDef))
            if case.function in names:
                return f"Solution().{case.function}"
    return case.function


# --- comparing -----------------------------------------------------------------------------------


def same_output(output: str, expected: str) -> bool:
    """Compare printed output line by line, ignoring leading and trailing white space. Words must be equal
    text, or close numbers, at least one of them written with a fraction or an exponent."""
    ours, theirs = _lines(output), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


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
    """Compare a value with expected JSON: tuples equal lists, keys are text, floats may be close."""
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
    except OverflowError:  # an integer too large for a float
        return False


def _value(ended: Ended | None) -> Any:
    """Return the value of a case, or an object that equals nothing."""
    if ended is None or ended.value is None:
        return object()
    try:
        return plain.decoded(json.loads(ended.value))
    except Exception:  # tested code may write anything
        return object()
