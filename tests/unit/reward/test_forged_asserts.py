"""Asserts without a literal: what programs do instead of solving the problem, and what honest ones return."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest

from bapo_megatron.reward import code
from bapo_megatron.reward.code import _value, program_is_right
from bapo_megatron.reward.code_tests import forgeable_tests, read_tests
from bapo_megatron.reward.expressions import Split
from bapo_megatron.reward.sandbox import plain
from bapo_megatron.reward.sandbox.sandbox import Ended, Sandbox

pytestmark = pytest.mark.integration


def right(ground_truth: str, source: str) -> bool:
    return program_is_right(ground_truth, f"```python\n{source}\n```", 512, 10.0, 60.0)


CLOSE = (
    '["assert abs(f(1) - 0.5) < 1e-6", "assert f(2) > 3", "assert not f(3)", "assert f(4).startswith(\'a\')"]'
)
HONEST = "def f(x): return [0.5, 4, 0, 'a'][x - 1]"
ANYTHING = """
class Anything:
    def __getattr__(self, name): return self
    def __call__(self, *_, **__): return True
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __ne__ = __bool__ = __contains__ = lambda *_: True
    __sub__ = __add__ = __mul__ = __abs__ = __round__ = lambda self, *_: self
"""
FORGERIES = {
    "equal list": "class A(list):\n    __eq__ = lambda *_: True\ndef f(x): return A()",
    "hard exit": "import os; os._exit(0)",
    "printed result": 'print(\'true\')\nprint(\'{"code": 0, "output": "", "value": "4"}\')',
    "patched harness": "import __main__, sys\n__main__._write_value = sys.modules.get('bapo_megatron')\n"
    "import bapo_megatron.reward.sandbox.child as s\ns._plain = lambda _: 4",
    "object that claims everything": ANYTHING + "f = lambda x: Anything()",
    "subclass of float": "class F(float):\n    __lt__ = __gt__ = lambda *_: True\n"
    "    __sub__ = lambda s, _: s\nf = lambda x: F(9)",
    "subclass of text": "class S(str):\n    startswith = lambda *_: True\n"
    "    __gt__ = __sub__ = lambda *_: 0\nf = lambda x: S('b')",
    "builtins.eval": "import builtins\nbuiltins.eval = lambda *_: True\nf = lambda x: 9",
    "builtins.compile": "import builtins\nold = compile\n"
    "builtins.compile = lambda s, n, m, **k: old('True' if m == 'eval' else s, n, m, **k)\nf = lambda x: 9",
    "builtins.abs": "import builtins\nbuiltins.abs = lambda _: 0\nf = lambda x: 9",
    "shadowed names": "abs = lambda _: 0\nnot_ = ARGUMENTS = [0.5, 4, 0, 'a']\nf = lambda x: 9",
    "json": "import json, json.encoder\njson.dumps = lambda *_, **__: 'true'\n"
    "json._default_encoder.encode = lambda *_: 'true'\njson.encoder.JSONEncoder.encode = lambda *_: 'true'\n"
    "f = lambda x: 9",
    "isinstance": "import builtins\nbuiltins.isinstance = builtins.hasattr = lambda *_: False\n"
    "builtins.int = builtins.bool = lambda *_: True\nf = lambda x: 9",
    "exit": "import os\ndef f(x): os._exit(0)",
    "descriptor 3": "import os\ndef f(x):\n    os.write(3, b'true')\n    os._exit(0)",
    "trace": "import sys\nsys.settrace(lambda frame, *_: frame.f_locals.update(value=True))\nf = lambda x: 9",
    "module of the tests": "import sys, types\nm = types.ModuleType('math')\n"
    "m.isclose = lambda *_, **__: True\nsys.modules['math'] = m\nmath = m\nf = lambda x: 9",
    "file for the judge": "open('math.py', 'w').write('isclose = lambda *_: True')\nf = lambda x: 9",
    "type that lies": "class A:\n    __class__ = property(lambda s: float)\n    __float__ = lambda s: 9.0\n"
    "f = lambda x: A()",
    "plain form": "f = lambda x: ['other', 'x']",
    "object form": "class Random:\n    pass\nf = lambda x: Random()",
    "iterator": "f = lambda x: iter([0.5])",
    "nothing": "f = lambda x: None",
}


COMPARED_WITH_TRUE = [
    "assert (abs(f(1) - 0.5) < 1e-6) == True",
    "assert False == (f(2) < 3)",
]


@pytest.mark.parametrize("test", COMPARED_WITH_TRUE)
def test_a_comparison_with_true_is_an_assert_without_a_literal(test: str) -> None:
    assert right(json.dumps([test]), HONEST)
    assert not right(json.dumps([test]), ANYTHING + "f = lambda x: Anything()")


@pytest.mark.parametrize("source", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize("test", [*json.loads(CLOSE)[:2], "assert f(2) == 4"], ids=["near", "order", "equal"])
def test_forged(test: str, source: str) -> None:
    assert not right(json.dumps([test, "assert math.isclose(f(1), 0.5)"]), source)
    assert not right('{"inputs": [[2]], "outputs": [4], "fn_name": "f"}', source)


def test_an_honest_program_passes() -> None:
    assert forgeable_tests(CLOSE) == 0
    assert right(CLOSE, HONEST)
    # A wrong form is a wrong answer, not an error of the scorer, which costs less.
    for form in (["written", "range"], ["written", "bytes", 10**14], ["written", "none", []], ["dict", 3]):
        assert type(_value(Ended(0, "", json.dumps(form)))) is object


def test_what_stays_beside_the_program_has_its_builtins_back() -> None:
    """Such a test is forgeable, but not by what a program has replaced."""
    loop = '["assert all(abs(f(i) - i) < 1 for i in range(3))"]'
    assert forgeable_tests(loop) == 1
    assert right(loop, "f = lambda x: x")
    for name in ("builtins.eval", "builtins.compile", "builtins.abs", "isinstance", "json"):
        source = "import builtins\nbuiltins.all = bool\n" + FORGERIES[name]
        assert not right(loop, source), name


LISTS = {
    "import_prefix": "class Node:\n    def __init__(self, value, rest=None):\n"
    "        self.value, self.rest = value, rest\n"
    "def node(items):\n    return Node(items[0], node(items[1:])) if items else None\n"
    "def same(a, b):\n    return a is b or (a.value == b.value and same(a.rest, b.rest))\n",
    "test_code": "def check(candidate):\n    assert same(candidate(node([1, 2, 3])), node([3, 2, 1]))\n",
    "entry_point": "Solution().turn",
}
TURN = """class Solution:
    def turn(self, head):
        done = None
        while head:
            head.rest, done, head = done, head, head.rest
        return done
"""


@pytest.mark.parametrize(
    ("ground_truth", "source", "is_it"),
    [
        (json.dumps(LISTS), TURN, True),
        (json.dumps(LISTS), TURN.replace("return done", "return None"), False),
        (json.dumps(LISTS), TURN + "same = lambda *_: True\nSolution.turn = lambda *_: None", False),
        ('["assert sorted(f(3)) == sorted([2, 1, 0])"]', "def f(n):\n    yield from range(n)", True),
        ('["assert Counter(f(2)) == Counter([1, 0])"]', "f = lambda n: list(range(n))", True),
        ('["assert f(1) in ([1, 2], [2, 1])"]', "f = lambda n: [2, 1]", True),
        ('["assert f(1) == 2 and f(2) == 3"]', "f = lambda n: 2", False),
        ('["assert isinstance(f(1), dict) and f(1)[1] == {2}"]', "f = lambda n: {n: {n + 1}}", True),
        ('["assert Solution().f(3) != Solution().f(4)"]', "class Solution:\n    f = lambda self, n: n", True),
        ('["assert f(f(1)) is True"]', "f = lambda n: n is not 2", True),
    ],
)
def test_asserts_on_the_values_of_calls(ground_truth: str, source: str, is_it: bool) -> None:
    assert forgeable_tests(ground_truth) == 0
    assert right(ground_truth, source) is is_it


def test_tests_that_can_be_forged_are_counted() -> None:
    block = {"test_code": "def check(f):\n    for n in (1, 2):\n        assert f(n) == n", "entry_point": "f"}
    assert forgeable_tests(json.dumps(block)) == 1
    assert forgeable_tests('["assert f(1) == 2", "assert set(map(f, [1])) == {f(2)}"]') == 1
    assert forgeable_tests('{"inputs": ["1"], "outputs": ["1"]}') == 0
    assert forgeable_tests(r"\frac{1}{2}") == 0
    assert forgeable_tests("{}") == 0
    helpers = {"test_code": "K = 2\ndef near(a): return abs(a) < K\ndef check(f):\n    assert near(f(1))\n"}
    (case,) = read_tests(json.dumps({**helpers, "entry_point": "f"})).cases
    assert getattr(case, "split", None) == Split(
        ("f(1)",), "near(ARGUMENTS[0])", "K = 2\ndef near(a):\n    return abs(a) < K"
    )


def row(check: str, around: str = "", entry: str = "f", **more: str) -> str:
    """The ground truth of a ``check`` with these statements in it and around it."""
    body = "\n    ".join(check.split("\n"))
    return json.dumps({"test_code": f"{around}\ndef check(f):\n    {body}", "entry_point": entry, **more})


REF = "def ref(x):\n    return x * x + 1"
ANSWERS = {
    "function": ("assert f(3) == ref(3)", REF, "ref(x)"),
    "table": ("assert f(3) == table[3]", "table = {3: 10}", "table[x]"),
    "by name": ("assert f(3) == ref(3)", REF, "globals()['ref'](x)"),
    "behind another": ("assert f(3) == high(3)", f"{REF}\ndef high(x):\n    return ref(x)", "ref(x)"),
    "beside a literal": ("assert f(3) - ref(3) == 0", REF, "ref(x)"),
    "in a set": ("assert len({f(3), ref(3)}) == 1", REF, "ref(x)"),
}


@pytest.mark.parametrize(("check", "around", "theft"), ANSWERS.values(), ids=ANSWERS)
def test_a_program_cannot_reach_what_is_expected(check: str, around: str, theft: str) -> None:
    assert forgeable_tests(row(check, around)) == 0
    assert right(row(check, around), "def f(x): return x * x + 1")
    assert not right(row(check, around), f"def f(x): return {theft}")


POINT = "class Point:\n    def __init__(s, x, y):\n        s.x, s.y = x, y"
CALLABLE = "class Ref:\n    def __call__(self, x): return x * x + 1"
HIDDEN = f"{REF}\ndef high(x):\n    return eval('ref(x)')"
COUNTED = {
    "a table of cases": ("assert f(CASES[0][0]) == CASES[0][1]", "CASES = [(1, 2)]"),
    "a shared function": ("assert f(make(1)) == make(2)", "def make(n):\n    return [n]"),
    "a class that answers": ("assert f(3) == Ref()(3)", CALLABLE),
    "a class of values": ("assert f(3) == Expected.table[3]", "class Expected:\n    table = {3: 10}"),
    "a method of a lambda": ("assert f(3) == R.go(3)", "class R:\n    go = staticmethod(lambda x: x + 1)"),
    "beside the program": ("assert sum(f(x) != ref(x) for x in (1, 2)) == 0", REF),
    "hidden names": ("assert f(3) == high(3)", HIDDEN),
    "an idle function": ("assert f(3) == 10", "def solution(x):\n    return solution(x) if x else 0"),
}
NOT_COUNTED = {
    "a class of arguments": ("assert f(Point(1, 2)) == Point(2, 1)", POINT),
    "a module": ("assert f(math.pi) == math.e", "import math"),
    "a maker of arguments": ("assert f(make(1)) == 3", "def make(n):\n    return [n]"),
    "an idle table": ("assert f(1) == 2", "METADATA = {'author': 'x'}"),
}


@pytest.mark.parametrize("name", [*COUNTED, *NOT_COUNTED])
def test_what_may_give_answers_away_is_counted(name: str) -> None:
    assert forgeable_tests(row(*{**COUNTED, **NOT_COUNTED}[name])) == (name in COUNTED)


INCREMENT = "def f(n): return n + 1"
HONEST_PROGRAMS = {
    "the entry's helper": (
        row("assert f(1) == 2", "def drive(n):\n    s = Solution()\n    return s.f(n)", "drive"),
        "class Solution:\n    def f(self, n): return n + 1",
    ),
    "a call that fills": (
        row("assert f(G) == 2", "G = {}\ndef build():\n    G[1] = [2]\n    G[2] = []\nbuild()"),
        "f = len",
    ),
    "two targets": (row("assert f(t) == 5", "t = [0]\nt[0] = x = 5"), "f = sum"),
    "an API of the tests": (
        row("assert f(9) == 4", "def is_bad(n):\n    return n >= 4"),
        "def f(n): return next(m for m in range(n) if is_bad(m))",
    ),
    "a class of the tests": (
        row(
            "assert f([1, 2]).to_list() == [1, 2]",
            "class L:\n    def __init__(s, v): s.v = v\n    def to_list(s): return s.v",
        ),
        "def f(v): return L(v)",
    ),
    "an addition": (row("assert f(y) == 4 and f(total) == 4", "total = 0\ny = 3\ntotal += y"), INCREMENT),
    "a function in the judgement": (
        row("assert f(1) == ref(1)\nassert ref(f(2)) == 4", "low = 1\ndef ref(n):\n    return n + low"),
        INCREMENT,
    ),
}


@pytest.mark.parametrize(("ground_truth", "source"), HONEST_PROGRAMS.values(), ids=HONEST_PROGRAMS)
def test_an_honest_program_has_what_it_needs(ground_truth: str, source: str) -> None:
    assert right(ground_truth, source)


def test_no_program_runs_after_a_judgement() -> None:
    """It could find the helpers in the memory that it was forked from."""
    asked: list[str] = []

    class Recorded(Sandbox):
        def value(self, *arguments: Any, **more: Any) -> Any:
            asked.append("program")
            return super().value(*arguments, **more)

        def judge(self, *arguments: Any, **more: Any) -> Any:
            asked.append("judge")
            return super().judge(*arguments, **more)

    checks = "\n".join(f"assert f({n}) == {n} + ref()\nassert f({n}) == {n + 1}" for n in range(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "Sandbox", Recorded)
        assert right(row(checks, "def ref(): return 1"), INCREMENT)
    assert asked == ["program"] * 24 + ["judge"] * 2


def test_plain_values_come_back_as_they_were() -> None:
    for value in (None, True, 3, -0.5, "a", [1, [2]], (1, "b"), frozenset({1}), {1: [2.0], "a": None}):
        assert plain.decoded(json.loads(json.dumps(plain.encoded(value)))) == value

    for other in (range(1, 9, 2), b"ab", 1j, deque([1, (2,)])):
        assert plain.decoded(json.loads(json.dumps(plain.encoded(other, objects=True)))) == other

    class Same:
        def __eq__(self, _: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert plain.decoded(plain.encoded(Same())) != 3
    assert plain.decoded(plain.encoded(Same(), objects=True), {"__name__": "x", "Same": Same}) != 3
