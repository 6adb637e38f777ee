"""Parser of a code problem's tests: ``read_tests(ground_truth)`` returns a ``Tests``, or raises ValueError.

The ground truth is text in a form of Skywork-OR1-RL-Data, its sources or other datasets, mostly JSON:

- ``{"inputs": [...], "outputs": [...]}``: input and output of a script, as text, a list of lines, or
  ``{"stdin": text}`` and ``{"stdout": text}`` (SandboxFusion); also as JSON text in ``input_output`` (TACO);
- the same with ``"fn_name"``: arguments and value of a function, or of a method of class Solution. An input
  is a list of arguments, or text with the JSON of one argument per line; then the output is JSON text;
- ``[{"input": ..., "output": ...}, ...]``, one object per test, or ``{"test_cases": ...}`` with such a list;
  the function is ``fn_name``, or ``func_name`` in ``metadata`` (DeepCoder, LiveCodeBench, SYNTHETIC);
- ``{"assert_case": ["assert f(1) == 2", ...]}``, that list alone, or one text that begins with an assert;
- ``{"import_prefix": ..., "test_code": "def check(candidate): ...", "entry_point": "Solution().f"}``;
- ``{"functional": "def check(candidate): ... check(Solution().f)"}`` (rLLM's LeetCode);
- pytest source: ``from solution import f``, and functions ``test_...`` (KodCode).

The tested program sees the helper statements around a problem's asserts, except a reference solution or table
of results, which a genuine solution cannot need: a plain function, or a name bound to a literal, that only
the expected side of asserts uses. Other statements that may leak answers make the tests ``forgeable``.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from bapo_megatron.reward.expressions import (
    NODES,
    USUAL,
    Helpers,
    Split,
    defined,
    names_of,
    node_names,
    split,
)


@dataclass(frozen=True)
class Printed:
    """Script test: given ``stdin``, the script must print ``expected``."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class Called:
    """Function test: ``function(*arguments)`` must return ``expected``."""

    function: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True)
class Asserted:
    """Assert test: after ``setup``, ``expression`` must equal the literal ``expected``, or be true. Without a
    literal, the expression is evaluated on the plain values of its calls, in a process without the program.
    An expression that cannot be split is evaluated in the program's process, which may forge it."""

    setup: str
    expression: str
    literal: bool
    expected: Any = True
    split: Split | None = None
    forgeable: bool = False
    """Whether a program can forge the test: its process evaluates the test, or holds the answer."""


Case = Printed | Called | Asserted


@dataclass(frozen=True)
class Tests:
    """Test cases of a problem, all of which a correct program passes, and code to run before the program."""

    cases: tuple[Case, ...]
    prelude: str = ""
    """Code that the problem puts before the solution."""


def is_tests(ground_truth: str) -> bool:
    """Whether a ground truth holds tests of a code problem: JSON in one of the forms, asserts, or pytest."""
    if ground_truth.lstrip().startswith("assert ") or _is_pytest(ground_truth):
        return True
    try:
        value = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or (isinstance(value, list) and (_are_asserts(value) or _are_cases(value)))


def are_tests(value: Any) -> bool:
    """Whether a dataset value, an object or a list of objects, has the form of tests."""
    if isinstance(value, dict):
        return not (_FORMS | {"test_cases", "input_output"}).isdisjoint(value)
    return isinstance(value, list) and _are_cases(value)


def check_tests(ground_truth: str) -> str | None:
    """Return the error of invalid tests, or None."""
    try:
        read_tests(ground_truth)
    except ValueError as error:
        return f"{error}; mend it or leave the row out"
    return None


def forgeable_tests(ground_truth: str) -> int:
    """Return the number of tests that a program can forge; 0 for a ground truth without valid tests."""
    if not is_tests(ground_truth):
        return 0
    try:
        cases = read_tests(ground_truth).cases
    except ValueError:
        return 0
    return sum(isinstance(case, Asserted) and case.forgeable for case in cases)


@lru_cache(maxsize=4)
def read_tests(ground_truth: str) -> Tests:
    """Parse the tests. Raises ValueError if they are invalid. Cached, for a group shares its tests; only a
    few, since tests of some megabytes take six times as much as objects."""
    if ground_truth.lstrip().startswith("assert "):
        return _asserts([ground_truth])
    if _is_pytest(ground_truth):
        return _of_pytest(ground_truth)
    tests = _json(ground_truth)
    if isinstance(tests, dict) and isinstance(tests.get("input_output"), (str, dict)):
        inner = tests["input_output"]
        tests = _json(inner) if isinstance(inner, str) else inner
    if isinstance(tests, list) and _are_asserts(tests):
        return _asserts(tests)
    cases = tests.get("test_cases") if isinstance(tests, dict) and not _FORMS & tests.keys() else tests
    if isinstance(cases, list) and _are_cases(cases):
        return _listed(cases)
    if not isinstance(tests, dict):
        raise ValueError('it must be an object with "inputs" and "outputs", or a list of assert statements')
    if "functional" in tests:
        return _functional(tests["functional"])
    if "test_code" in tests:
        return _checked(tests)
    if "assert_case" in tests:
        return _asserts(tests["assert_case"])
    return _pairs(tests)


_FORMS = {"inputs", "outputs", "test_code", "assert_case", "functional"}
"""Keys of the other object forms, which take precedence over ``test_cases``."""


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON of tests: {error}") from None


def _are_asserts(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, str) and item.lstrip().startswith("assert") for item in value)


def _are_cases(value: list[Any]) -> bool:
    return bool(value) and all(
        isinstance(case, dict) and {"input", "output"} <= case.keys() for case in value
    )


def _listed(cases: list[dict[str, Any]]) -> Tests:
    about = [case.get("metadata") for case in cases]
    inner = [case.get("func_name") if isinstance(case, dict) else None for case in about]
    names = {str(case.get("fn_name") or name or "") for case, name in zip(cases, inner, strict=True)}
    kinds = {str(case.get("testtype") or case.get("type")) for case in cases}
    if len(names) > 1 or (names == {""} and kinds & {"functional", "function_call"}):
        raise ValueError(f"its tests are of the functions {sorted(names)}; they must be of one")
    inputs, outputs = ([case[side] for case in cases] for side in ("input", "output"))
    return _pairs({"inputs": inputs, "outputs": outputs, "fn_name": names.pop()})


def _pairs(tests: dict[str, Any]) -> Tests:
    inputs, outputs = (tests.get(f"{side}s", tests.get(side)) for side in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        keys = f"; its keys are {', '.join(map(repr, tests))[:200]}" if tests else ""
        raise ValueError(f'"inputs" and "outputs" must be lists, not empty{keys} (docs/rewards.md#programs)')
    if len(inputs) != len(outputs):
        raise ValueError(f'it has {len(inputs)} "inputs" but {len(outputs)} "outputs"')
    function = tests.get("fn_name")
    if not function:
        pairs = zip(inputs, outputs, strict=True)
        return Tests(tuple(Printed(_text(stdin, "stdin"), _text(said, "stdout")) for stdin, said in pairs))
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f'"fn_name" is {function!r}; it must be the name of a function')
    return Tests(tuple(map(_called, [function] * len(inputs), inputs, outputs)))


def _text(value: Any, stream: str) -> str:
    """Return script input or output as text, from text, a number, a list of lines, or {stream: text}."""
    if isinstance(value, dict) and {key for key, inner in value.items() if inner is not None} == {stream}:
        value = value[stream]  # Arrow gives all rows the same keys, with None for missing ones
    lines = value if isinstance(value, list) else [value]
    for line in lines:
        if not isinstance(line, (str, int, float)):
            forms = f'it must be text, a list of lines, or {{"{stream}": text}}'
            raise ValueError(f"a script has {json.dumps(line)[:80]} as {stream}; {forms}")
    return "\n".join(map(str, lines))


def _called(function: str, arguments: Any, expected: Any) -> Called:
    if isinstance(arguments, str):
        try:
            arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the input {arguments[:80]!r} is not one JSON value a line: {error}") from None
        expected = _json_or_text(expected)
    if not isinstance(arguments, list):
        raise ValueError(f"the input {arguments!r} of {function} must be a list of arguments")
    return Called(function, arguments, expected)


def _json_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


# --- asserts -------------------------------------------------------------------------------------


def _asserts(statements: Any) -> Tests:
    if not isinstance(statements, list) or not _are_asserts(statements):
        raise ValueError('"assert_case" must be a list of assert statements, not empty')
    return Tests(tuple(case for text in statements for case in _cases(_parsed(text).body, [], "", "")))


def _checked(tests: dict[str, Any]) -> Tests:
    """Parse ``check(candidate)``: one case per assert if it contains only asserts."""
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
    """Yield one case per assert; a block with other statements stays one case."""
    asserts = [node for node in statements if isinstance(node, ast.Assert)]
    if len(asserts) < len(statements):
        block = "\n".join([*map(ast.unparse, helpers), entry, *map(ast.unparse, statements)])
        yield Asserted(block, "True", literal=False, forgeable=True)
        return
    known, around = names_of(USUAL) | names_of(prelude), Helpers(helpers)
    parts_of = partial(split, known=known | around.names, helpers=around.text())
    parts = [parts_of(node.test) if around.stand_alone(known) else None for node in asserts]
    read = [_asserted(node.test, asserted, around) for node, asserted in zip(asserts, parts, strict=True)]
    used = _read(entry).union(*(asserted.used for asserted in read))
    beside = around.beside(used, frozenset[str]().union(*(asserted.judged for asserted in read)))
    setup = "\n".join(filter(None, (around.text(beside), entry)))
    all_read = used.union(*(asserted.judged for asserted in read))
    unknown = bool(around.idle_functions(all_read)) or (around.hide_names and around.may_leak_answers(beside))
    for asserted in read:
        told = unknown or around.may_leak_answers(around.needed(asserted.judged) & beside)
        yield replace(asserted.case, setup=setup, forgeable=asserted.case.forgeable or told)


def _functional(text: Any) -> Tests:
    module = _parsed(text if isinstance(text, str) else "")
    values = [node.value for node in module.body if isinstance(node, ast.Expr)]
    calls = [value for value in values if isinstance(value, ast.Call) and ast.unparse(value.func) == "check"]
    if len(calls) != 1 or len(calls[0].args) != 1:
        raise ValueError('"functional" must be text that defines check(candidate) and calls it once')
    module.body = [node for node in module.body if getattr(node, "value", None) is not calls[0]]
    nodes = defined(ast.parse(NODES)) - defined(module)
    prefix = NODES if nodes & node_names(module) else ""
    entry = ast.unparse(calls[0].args[0])
    return _checked({"import_prefix": prefix, "test_code": ast.unparse(module), "entry_point": entry})


def _is_pytest(text: str) -> bool:
    return "def test" in text and text.lstrip()[:1] not in ("{", "[", '"')


def _of_pytest(text: str) -> Tests:
    """Parse functions ``test_...`` without arguments, which import the tested program as ``solution``."""
    body = [node for node in _parsed(text).body if not _is_of_pytest(node)]
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    helpers = [node for node in body if node not in tests]
    if not tests:
        raise ValueError("it has no function test_...() of pytest at its top level")
    for node in body:
        if "pytest" in node_names(node) or _is_beyond(node):
            raise ValueError(
                f"{ast.unparse(node)[:80]!r} needs pytest (raises, fixtures, parameters, classes) or imports "
                "more than `from solution import NAME`: only functions test_...() without arguments are read"
            )
    return Tests(tuple(case for test in tests for case in _of_function(test, helpers)))


def _is_of_pytest(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "solution" and not any(name.asname for name in node.names)
    if isinstance(node, ast.Import):
        return [name.name for name in node.names] == ["pytest"]
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _is_beyond(node: ast.stmt) -> bool:
    """Whether the statement needs features of pytest, or imports the solution in another way."""
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
        return bool(node.decorator_list or node.args.args or node.args.kwonlyargs)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "solution" in (getattr(node, "module", None), *(name.name for name in node.names))
    return isinstance(node, (ast.ClassDef, ast.AsyncFunctionDef)) and node.name.lower().startswith("test")


def _of_function(test: ast.FunctionDef, helpers: list[ast.stmt]) -> Iterator[Case]:
    spoken = ast.get_docstring(test) is not None
    statements = test.body[1:] if spoken else test.body
    if all(isinstance(node, ast.Assert) for node in statements):
        yield from _cases(statements, helpers, "", "")
        return
    block = "\n".join(map(ast.unparse, [*helpers, test]))
    yield Asserted(f"{block}\n{test.name}()", "True", literal=False, forgeable=True)


def read_names(case: Case) -> frozenset[str]:
    """Return the names that an assert reads in the program's process."""
    if not isinstance(case, Asserted):
        return frozenset()
    return _read("\n".join((case.setup, *(case.split.calls if case.split else (case.expression,)))))


@dataclass(frozen=True)
class _Read:
    """A parsed assert, with its names read in the program's process, and those read by the judgement."""

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
    """Return the tested side and the value of ``tested == literal``; None for another expression."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return None
    for tested, expected in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        try:
            value = ast.literal_eval(expected)
        except (ValueError, TypeError):
            continue  # not a literal
        if not isinstance(value, bool):  # a boolean is easily guessed
            return tested, value
    return None


def _read(source: str) -> frozenset[str]:
    return node_names(ast.parse(source))


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source[:80]!r} is not Python: {error}") from None
