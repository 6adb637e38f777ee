"""Parser of a code problem's tests from its ground truth, which is JSON text.

It has one of the forms of Skywork-OR1-RL-Data and its sources, or of DeepCoder; ValueError for any other:

- ``{"inputs": [...], "outputs": [...]}``: what a script reads and prints, as text or as a list of lines;
- the same with ``"fn_name"``: arguments and value of a function, or of a method of class Solution. An input
  is a list of arguments, or text with the JSON of one argument a line; then the output is text with JSON;
- ``[{"input": ..., "output": ...}, ...]``, a test each, or ``{"test_cases": ...}`` with such a list; the
  function is ``fn_name``, or ``func_name`` of ``metadata`` (DeepCoder, LiveCodeBench, SYNTHETIC);
- ``{"assert_case": ["assert f(1) == 2", ...]}``, that list alone, or one text that begins with an assert;
- ``{"import_prefix": ..., "test_code": "def check(candidate): ...", "entry_point": "Solution().f"}``.

Of the helper statements around a problem's asserts the tested program sees all but a reference solution or a
table of results that an honest program cannot need: a plain function, or a name bound to a literal, that only
the expected side of asserts uses. Statements that stay and may leak answers are counted. ``code.py`` scores
by it, checks of datasets call it. Used in ``commands/``, ``data/``, ``evaluation/`` and this folder.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from bapo_megatron.reward.expressions import BUILTINS, Split, bound_names, node_names, split

_HIDES_NAMES = frozenset(("eval", "exec", "globals", "locals", "vars", "compile", "__import__"))
"""Builtins by which code reaches any name: then names do not show what it reads."""

_SPECIAL = frozenset(("__init__", "__repr__", "__str__", "__eq__", "__hash__", "__lt__"))
_FEW = (0, 1, -1, None, "", Ellipsis)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Helpers:
    """Helper statements of a problem, by index; nothing of them is run."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self._statements = statements
        self._binds = [_bound(statement) for statement in statements]
        self._reads = [node_names(statement) for statement in statements]
        self.names = frozenset[str]().union(*map(bound_names, statements))
        """All names that the statements bind, at any depth."""

    def needed(self, names: Iterable[str]) -> frozenset[int]:
        """Statements that bind the names, with all that these need in turn."""
        found: set[int] = set()
        wanted = set(names)
        while more := {
            number
            for number, binds in enumerate(self._binds)
            if number not in found and not binds.isdisjoint(wanted)
        }:
            found |= more
            wanted.update(*(self._reads[number] | self._binds[number] for number in more))
        return frozenset(found)

    def beside(self, used: Iterable[str], judged: Iterable[str]) -> frozenset[int]:
        """Statements that the tested program's process gets.

        ``used``: names that are read there; ``judged``: names of the expected side, evaluated elsewhere.
        """
        used, everything = set(used), frozenset(range(len(self._statements)))
        if self.hide_names:
            return everything
        expected = self.needed(judged)
        stay = {number for number in everything if number not in expected or not self._is_removable(number)}
        return self.needed(used.union(*(self._reads[n] | self._binds[n] for n in stay))) | stay

    def stand_alone(self, known: frozenset[str]) -> bool:
        """Whether they run without the tested program. ``known``: more names that are not the program's."""
        names = BUILTINS | known | self.names
        return all(reads <= names for reads in self._reads)

    @property
    def hide_names(self) -> bool:
        """Whether they use builtins (eval, globals, ...) by which they can read any name."""
        return not _HIDES_NAMES.isdisjoint(frozenset[str]().union(*self._reads))

    def may_leak_answers(self, numbers: Iterable[int]) -> bool:
        """Whether they may leak an answer: all but imports, and classes that only hold values."""
        return any(not self._is_inert(self._statements[number]) for number in numbers)

    def idle_functions(self, used: Iterable[str]) -> frozenset[int]:
        """Functions that no test reads: helpers for the program, or a reference solution."""
        return frozenset(
            number
            for number, statement in enumerate(self._statements)
            if isinstance(statement, _Function)
            and statement.name not in set(used).union(*self._reads[:number], *self._reads[number + 1 :])
        )

    def text(self, numbers: Iterable[int] | None = None) -> str:
        """Source text of all of them, or of some, in their order."""
        chosen = range(len(self._statements)) if numbers is None else sorted(numbers)
        return "\n".join(ast.unparse(self._statements[number]) for number in chosen)

    def _is_removable(self, number: int) -> bool:
        """Whether it may be left out: it only binds one name."""
        statement = self._statements[number]
        if isinstance(statement, _Function):
            defaults = [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
            return not statement.decorator_list and all(isinstance(one, ast.Constant) for one in defaults)
        if not isinstance(statement, ast.Assign):
            return False
        targets = statement.targets
        return len(targets) == 1 and isinstance(targets[0], ast.Name) and _is_literal(statement.value)

    def _is_inert(self, statement: ast.stmt) -> bool:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return True
        if not isinstance(statement, ast.ClassDef):
            return False
        own = frozenset[str]().union(*self._binds) - {statement.name}
        inside = [node for item in statement.body for node in ast.walk(item)]
        return (
            all(item.name in _SPECIAL for item in statement.body if isinstance(item, _Function))
            and all(node.value in _FEW for node in inside if isinstance(node, ast.Constant))
            and not any(isinstance(node, ast.Lambda) for node in inside)
            and own.isdisjoint(node_names(statement))
        )


def _bound(statement: ast.stmt) -> frozenset[str]:
    """Names that a statement binds in its scope; unless it is a definition, at any depth."""
    if isinstance(statement, (*_Function, ast.ClassDef)):
        return frozenset((statement.name,))
    return bound_names(statement)


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, isqrt, log2, pi, sqrt
from typing import *
"""
"""Imports that sites with function problems give to a solution."""


@dataclass(frozen=True)
class Printed:
    """Test of a script, as plain data: with ``stdin`` it must print ``expected``."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class Called:
    """Test of a function, as plain data: ``function(*arguments)`` must return ``expected``."""

    function: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True)
class Asserted:
    """Assert test: after ``setup`` the expression must equal the literal ``expected``, or else be true.

    Without a literal it is evaluated on the plain values of its calls, in a process without the program. One
    that cannot be split is evaluated in the program's process, which may forge it.
    """

    setup: str
    expression: str
    literal: bool
    expected: Any = True
    split: Split | None = None
    forgeable: bool = False
    """Whether a program can forge it: it is evaluated in the program's process, or its answer is there."""


Case = Printed | Called | Asserted


@dataclass(frozen=True)
class Tests:
    """The test cases of a problem, as plain data; a right program passes all."""

    cases: tuple[Case, ...]
    prelude: str = ""
    """Code that the problem puts before the solution."""


def is_tests(ground_truth: str) -> bool:
    """Whether a ground truth is the tests of a code problem: a JSON object, or assert statements."""
    if ground_truth.lstrip().startswith("assert "):
        return True
    try:
        value = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or (isinstance(value, list) and (_are_asserts(value) or _are_cases(value)))


def check_tests(ground_truth: str) -> str | None:
    """Error of the tests, or None."""
    try:
        read_tests(ground_truth)
    except ValueError as error:
        return f"{error}; mend it or leave the row out"
    return None


def forgeable_tests(ground_truth: str) -> int:
    """Number of a problem's tests that a program can forge; 0 for a ground truth that is no tests."""
    if not is_tests(ground_truth):
        return 0
    try:
        cases = read_tests(ground_truth).cases
    except ValueError:
        return 0
    return sum(isinstance(case, Asserted) and case.forgeable for case in cases)


@lru_cache(maxsize=32)
def read_tests(ground_truth: str) -> Tests:
    """Parse the tests. ValueError with the reason if they are invalid. Cached: a group has the same tests."""
    if ground_truth.lstrip().startswith("assert "):
        return _asserts([ground_truth])
    try:
        tests = json.loads(ground_truth)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON of tests: {error}") from None
    if isinstance(tests, list) and _are_asserts(tests):
        return _asserts(tests)
    cases = tests.get("test_cases") if isinstance(tests, dict) and not _FORMS & tests.keys() else tests
    if isinstance(cases, list) and _are_cases(cases):
        return _listed(cases)
    if not isinstance(tests, dict):
        raise ValueError('it must be an object with "inputs" and "outputs", or a list of assert statements')
    if "test_code" in tests:
        return _checked(tests)
    if "assert_case" in tests:
        return _asserts(tests["assert_case"])
    return _pairs(tests)


_FORMS = {"inputs", "outputs", "test_code", "assert_case"}
"""Keys of the other objects, which count before ``test_cases``."""


def _are_asserts(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, str) and item.lstrip().startswith("assert") for item in value)


def _are_cases(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in value)


def _listed(cases: list[dict[str, Any]]) -> Tests:
    """Tests that have an object each, all of scripts or all of one function."""
    about = [one.get("metadata") for one in cases]
    inner = [one.get("func_name") if isinstance(one, dict) else None for one in about]
    names = {str(one.get("fn_name") or name or "") for one, name in zip(cases, inner, strict=True)}
    kinds = {str(one.get("testtype") or one.get("type")) for one in cases}
    if len(names) > 1 or (names == {""} and kinds & {"functional", "function_call"}):
        raise ValueError(f"its tests are of the functions {sorted(names)}; they must be of one")
    inputs, outputs = ([one[side] for one in cases] for side in ("input", "output"))
    return _pairs({"inputs": inputs, "outputs": outputs, "fn_name": names.pop()})


def _pairs(tests: dict[str, Any]) -> Tests:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError('"inputs" and "outputs" must be lists, not empty')
    if len(inputs) != len(outputs):
        raise ValueError(f'it has {len(inputs)} "inputs" but {len(outputs)} "outputs"')
    function = tests.get("fn_name")
    if not function:
        pairs = zip(inputs, outputs, strict=True)
        return Tests(tuple(Printed(_text(given), _text(expected)) for given, expected in pairs))
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f'"fn_name" is {function!r}; it must be the name of a function')
    return Tests(tuple(map(_called, [function] * len(inputs), inputs, outputs)))


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _called(function: str, given: Any, expected: Any) -> Called:
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the input {given[:80]!r} is not one JSON value a line: {error}") from None
        expected = _json_or_text(expected)
    if not isinstance(given, list):
        raise ValueError(f"the input {given!r} of {function} must be a list of arguments")
    return Called(function, given, expected)


def _json_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except RecursionError as error:  # no text: nothing that a program returns would be equal to it
        raise ValueError(f"the output {value[:80]!r} nests too deep: {error}") from None
    except ValueError:
        return value


# --- asserts -------------------------------------------------------------------------------------


def _asserts(statements: Any) -> Tests:
    if not isinstance(statements, list) or not _are_asserts(statements):
        raise ValueError('"assert_case" must be a list of assert statements, not empty')
    return Tests(tuple(case for text in statements for case in _cases(_parsed(text).body, [], "", "")))


def _checked(tests: dict[str, Any]) -> Tests:
    """``check(candidate)``: its asserts one by one, if there is nothing else in it."""
    for name in ("test_code", "entry_point"):
        if not isinstance(tests.get(name), str):
            raise ValueError(f'"{name}" is {tests.get(name)!r}; it must be text')
    module = _parsed(tests["test_code"]).body
    checks = [node for node in module if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not checks or not checks[0].args.args:
        raise ValueError('"test_code" defines no function check(candidate)')
    check = checks[0]
    prelude = str(tests.get("import_prefix") or "")
    around = [node for node in module if node is not check]
    entry = f"{check.args.args[0].arg} = {tests['entry_point']}"
    _parsed(entry)
    return Tests(tuple(_cases(check.body, around, entry, prelude)), prelude)


def _cases(statements: list[ast.stmt], helpers: list[ast.stmt], entry: str, prelude: str) -> Iterator[Case]:
    """One case for each assert; a block with other statements stays one case.

    ``helpers``: the statements around the asserts; ``entry`` names the tested program as the asserts do.
    """
    asserts = [node for node in statements if isinstance(node, ast.Assert)]
    if len(asserts) < len(statements):
        block = "\n".join([*map(ast.unparse, helpers), entry, *map(ast.unparse, statements)])
        yield Asserted(block, "True", literal=False, forgeable=True)
        return
    known, around = _names_of(PRELUDE) | _names_of(prelude), Helpers(helpers)
    parts_of = partial(split, known=known | around.names, helpers=around.text())
    parts = [parts_of(node.test) if around.stand_alone(known) else None for node in asserts]
    read = [_asserted(node.test, one, around) for node, one in zip(asserts, parts, strict=True)]
    used = _read(entry).union(*(one.used for one in read))
    beside = around.beside(used, frozenset[str]().union(*(one.judged for one in read)))
    setup = "\n".join(filter(None, (around.text(beside), entry)))
    all_read = used.union(*(one.judged for one in read))
    unknown = bool(around.idle_functions(all_read)) or (around.hide_names and around.may_leak_answers(beside))
    for one in read:
        told = unknown or around.may_leak_answers(around.needed(one.judged) & beside)
        yield replace(one.case, setup=setup, forgeable=one.case.forgeable or told)


def _names_of(source: str) -> frozenset[str]:
    """Names that the source binds; of ``import *`` those of the modules in PRELUDE."""
    try:
        return bound_names(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()


@dataclass(frozen=True)
class _Read:
    """A case without its setup, and names that it reads: in the program's process, and in the judgement."""

    case: Asserted
    used: frozenset[str]
    judged: frozenset[str] = frozenset()


def _asserted(test: ast.expr, parts: Split | None, around: Helpers) -> _Read:
    text = ast.unparse(test)
    judged = _read(parts.judgement) if parts else frozenset()
    if (sides := _with_literal(test)) and not around.may_leak_answers(around.needed(judged)):
        tested, value = sides
        told = parts is None and around.may_leak_answers(around.needed(node_names(tested)))
        case = Asserted("", ast.unparse(tested), True, value, forgeable=told)
        return _Read(case, node_names(tested))
    if parts is None:
        return _Read(Asserted("", text, literal=False, forgeable=True), node_names(test))
    used = frozenset[str]().union(*map(_read, parts.calls))
    return _Read(Asserted("", text, literal=False, split=parts), used, judged)


def _with_literal(test: ast.expr) -> tuple[ast.expr, Any] | None:
    """The tested side and the value of ``tested == literal``; None for another expression."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return None
    for tested, expected in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        try:
            value = ast.literal_eval(expected)
        except (ValueError, TypeError):
            continue  # it is no literal
        if not isinstance(value, bool):  # whose value is easily guessed
            return tested, value
    return None


def _read(source: str) -> frozenset[str]:
    return node_names(ast.parse(source))


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source[:80]!r} is not Python: {error}") from None
