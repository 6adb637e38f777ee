"""Asserts without a literal: what programs do instead of solving the problem, and what honest ones return."""

from __future__ import annotations

import ast
import json
from collections import deque
from typing import Any

import pytest

from bapo_megatron.reward.code import _value, program_is_right
from bapo_megatron.reward.code_tests import forgeable_tests, read_tests
from bapo_megatron.reward.expressions import Split, needed, split
from bapo_megatron.reward.sandbox import plain
from bapo_megatron.reward.sandbox.sandbox import Ended

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
    "assert (f(4) == 'a') == True",
    "assert all(x > 3 for x in [f(2)]) == True",
    "assert False == (f(2) < 3)",
]


@pytest.mark.parametrize("test", COMPARED_WITH_TRUE)
def test_a_comparison_with_true_is_an_assert_without_a_literal(test: str) -> None:
    assert right(json.dumps([test]), HONEST)
    assert not right(json.dumps([test]), ANYTHING + "f = lambda x: Anything()")


def test_a_wrong_form_is_a_wrong_answer() -> None:
    """Not an error of the scorer, which costs less."""
    for form in (["written", "range"], ["written", "bytes", 10**14], ["written", "none", []], ["dict", 3]):
        assert type(_value(Ended(0, "", json.dumps(form)))) is object


def test_an_honest_program_passes() -> None:
    assert forgeable_tests(CLOSE) == 0
    assert right(CLOSE, HONEST)


@pytest.mark.parametrize("source", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize("test", json.loads(CLOSE)[:2], ids=["difference", "order"])
def test_forged(test: str, source: str) -> None:
    assert not right(json.dumps([test, "assert math.isclose(f(1), 0.5)"]), source)


def test_what_stays_beside_the_program_has_its_builtins_back() -> None:
    """Such a test is forgeable, but not by what a program has replaced."""
    loop = '["assert all(abs(f(i) - i) < 1 for i in range(3))"]'
    assert forgeable_tests(loop) == 1
    assert right(loop, "f = lambda x: x")
    for name in ("builtins.eval", "builtins.compile", "builtins.abs", "isinstance", "json"):
        source = FORGERIES[name].replace(
            "f = lambda x: 9", "import builtins\nbuiltins.all = bool\nf = lambda x: 9"
        )
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
        ('["assert f(1) == 2 and f(2) == 3"]', "f = lambda n: n + 1", True),
        ('["assert f(1) == 2 and f(2) == 3"]', "f = lambda n: 2", False),
        ('["assert isinstance(f(1), dict) and f(1)[1] == {2}"]', "f = lambda n: {n: {n + 1}}", True),
        (
            '["assert Solution().f(3) != Solution().f(4)"]',
            "class Solution:\n    def f(self, n): return n",
            True,
        ),
        ('["assert f(f(1)) is True"]', "f = lambda n: n is not 2", True),
        ('["assert len(f(2)) == len(f(3)) - 1"]', "f = range", True),
    ],
)
def test_asserts_on_the_values_of_calls(ground_truth: str, source: str, is_it: bool) -> None:
    assert forgeable_tests(ground_truth) == 0
    assert right(ground_truth, source) is is_it


@pytest.mark.parametrize(
    ("test", "calls", "judgement"),
    [
        ("abs(f(1) - 0.5) < 1e-6", ("f(1)",), "abs(ARGUMENTS[0] - 0.5) < 1e-06"),
        ("f(f(1)) > f(2)", ("f(f(1))", "f(2)"), "ARGUMENTS[0] > ARGUMENTS[1]"),
        ("f(1).strip() != 'x'", ("f(1)",), "ARGUMENTS[0].strip() != 'x'"),
        ("Solution().g(1)[0] > 2", ("Solution().g(1)",), "ARGUMENTS[0][0] > 2"),
        ("all(x > 1 for x in f(1))", ("f(1)",), "all((x > 1 for x in ARGUMENTS[0]))"),
        ("all(f(x) > 1 for x in (1, 2))", None, None),
        ("set(map(f, (1, 2))) > {1}", None, None),
        ("Point(1) != Point(2)", None, None),
        ("f(1) > limit", None, None),
        ("1 < 2", None, None),
    ],
)
def test_the_parts_of_an_assert(test: str, calls: Any, judgement: Any) -> None:
    found = split(ast.parse(test, mode="eval").body, [], [])
    assert found == (Split(calls, judgement) if calls else None)


def test_tests_that_can_be_forged_are_counted() -> None:
    block = {"test_code": "def check(f):\n    for n in (1, 2):\n        assert f(n) == n", "entry_point": "f"}
    assert forgeable_tests(json.dumps(block)) == 1
    assert (
        forgeable_tests('["assert f(1) == 2", "assert set(map(f, [1])) == {f(2)}", "assert f(1) > 2"]') == 1
    )
    assert forgeable_tests('{"inputs": ["1"], "outputs": ["1"]}') == 0
    assert forgeable_tests(r"\frac{1}{2}") == 0
    assert forgeable_tests("{}") == 0
    helpers = {"test_code": "K = 2\ndef near(a): return abs(a) < K\ndef check(f):\n    assert near(f(1))\n"}
    (case,) = read_tests(json.dumps({**helpers, "entry_point": "f"})).cases
    assert getattr(case, "split", None) == Split(
        ("f(1)",), "near(ARGUMENTS[0])", "K = 2\ndef near(a):\n    return abs(a) < K"
    )


REFERENCE = {
    "test_code": "import math\n"
    "class Node:\n    def __init__(self, value):\n        self.value = value\n"
    "class Solved:\n    def f(self, x):\n        return reference(x)\n"
    "def gift(n):\n    return [n] * WIDE\n"
    "WIDE = 0\n"
    "for step in range(3):\n    WIDE += step\n"
    "def reference(x):\n    return math.fsum(x) + 1\n"
    "expected = {1: reference(gift(1))}\n"
    "def check(candidate):\n"
    "    assert candidate(gift(1)) == expected[1]\n"
    "    assert candidate(gift(2)) == 7.0\n"
    "    assert abs(candidate(gift(3)) - Solved().f(gift(3))) < 1e-9\n",
    "entry_point": "f",
}


def test_a_program_cannot_reach_the_tests_own_solution() -> None:
    """Its process has of the helpers what the calls need: here ``gift``, which the tests count as shared."""
    assert right(json.dumps(REFERENCE), "def f(x): return sum(x, 1.0) if Node(1) and len(x) == 3 else 0")
    for theft in ("reference(x)", "expected[x[0]]", "Solved().f(x)", "globals()['reference'](x)"):
        assert not right(json.dumps(REFERENCE), f"def f(x): return {theft}"), theft
    assert forgeable_tests(json.dumps(REFERENCE)) == 2  # the literal one is not


def test_what_a_call_needs_of_the_helpers() -> None:
    module = ast.parse(
        "import os\nseed(0)\nlow = 1\nhigh = low + 1\ntable = []\nfor low in (1, 2):\n    table.append(low)\n"
        "table[0] = answer(1)\ndef answer(x):\n    low = 3\n    return x\ndef other():\n    return high\n"
        "class Plain:\n    x: int = 0\nclass Busy:\n    def run(self): return high\n"
    ).body

    def named(expression: str) -> list[str]:
        return [ast.unparse(statement).split("\n")[0] for statement in needed([expression], module)]

    always = ["import os", "seed(0)", "class Plain:"]
    low = ["low = 1", "table = []", "for low in (1, 2):", "table[0] = answer(1)", "def answer(x):"]
    assert named("f(1)") == named("f(lambda low: low)") == always
    for expression in ("f(low)", "f(table)", "f(answer)"):
        assert sorted(named(expression)) == sorted(always + low)
    assert sorted(named("f(other())")) == sorted([*always, *low, "high = low + 1", "def other():"])
    assert named("f(low)")[:3] == ["import os", "seed(0)", "low = 1"]
    with pytest.raises(ValueError, match="is not Python"):
        needed(["f(1)"], ast.parse("nonlocal low").body)


def test_rows_that_share_a_helper_are_counted() -> None:
    def count(check: str, around: str) -> int:
        code = f"{around}\ndef check(f):\n    {check}"
        return forgeable_tests(json.dumps({"test_code": code, "entry_point": "f"}))

    assert count("assert f(CASES[0][0]) == CASES[0][1]", "CASES = [(1, 2)]") == 1
    assert count("assert f(1) == ref(1)", "def ref(x): return x + 1") == 0
    assert count("assert f(Point(1, 2)) == Point(2, 1)", "class Point:\n    def __init__(s, x, y): pass") == 0
    assert count("assert f(math.pi) == math.e", "import math") == 0


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
