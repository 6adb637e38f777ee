"""The calculator by hand: values, errors for the model, calls in both formats, and an episode over a kill."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.environment import Reply, Task
from bapo_megatron.environment.tools.calculator import Calculator, evaluate
from bapo_megatron.runtime.child_process import within
from tests.support.scripted_episodes import check_durable

TASK = Task([{"role": "user", "content": "47+86="}])


def call(expression: str) -> str:
    return (
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47+86", "133"),
        ("7//2", "3"),
        ("-7%3", "2"),
        ("0.1+0.2", "0.3"),
        ("2/3", "0.666666666667"),
        ("-2^2", "-4"),
        ("2**-3", "0.125"),
        ("1,234,567*2", "2469134"),
        ("2 \u00d7 3 \u00f7 4", "1.5"),
        ("(-1)**99999999999", "-1"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1/0", "division by zero"),
        ("9**9**9", "the number is too large"),
        ("1e400", "the number is too large"),
        ("2**0.5", "an exponent must be a whole number"),
        ("__import__('os').system('ls')", "is none of: numbers"),
        ("True+1", "'True' is none of"),
        ("1+" * 600, "has 1200 characters; at most 1000"),
        ("(" * 400 + "1" + ")" * 400, "nested too deeply|not an arithmetic expression"),
    ],
)
def test_errors_are_for_the_model(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        evaluate(expression)


@given(numbers=st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=5), seed=st.randoms())
def test_sums_products_and_quotients_are_exact(numbers: list[int], seed: object) -> None:
    """Against fractions; written as an integer where it is one."""
    total = sum(numbers)
    assert evaluate("+".join(f"({one})" for one in numbers)) == str(total)
    product = Fraction(1)
    for one in numbers:
        product *= one
    assert evaluate("*".join(f"({one})" for one in numbers)) == str(product)
    if numbers[0]:
        assert evaluate(f"({product})/({numbers[0]})*({numbers[0]})") == str(product)


@given(st.text(st.characters(codec="ascii"), max_size=40))
def test_whatever_the_model_writes_is_a_value_or_a_valueerror(expression: str) -> None:
    with suppress(ValueError):
        assert Fraction(evaluate(expression)) is not None


def test_calls_in_json_over_a_kill() -> None:
    """A call that is thought of is none, two are answered in order, and an answer ends the episode."""
    turns = [
        f"<think>{call('1+1')}</think>{call('47+86')}",
        call("1/0") + call("2*3"),
        '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
        "<tool_call>{'name'}",
        call("4+5").removesuffix("</tool_call>"),
        "<think>" + call("1+1") + "</think>\\boxed{133}",
    ]
    replies = check_durable(Calculator, TASK, {}, turns)
    assert replies == [
        Reply("133", metrics={"calls": 1.0, "call_errors": 0.0}),
        Reply(["error: division by zero", "6"], metrics={"calls": 2.0, "call_errors": 1.0}),
        Reply(
            "error: there is no tool 'search'; the tool is 'calculator'",
            metrics={"calls": 1.0, "call_errors": 1.0},
        ),
        Reply(
            "error: the tool call is not JSON: Expecting property name enclosed in double quotes: line 1 "
            "column 2 (char 1)",
            metrics={"calls": 1.0, "call_errors": 1.0},
        ),
        Reply("9", metrics={"calls": 1.0, "call_errors": 0.0}),
        Reply(None, metrics={"calls": 0.0, "call_errors": 0.0}),
    ]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("47+86", "133"),
        ("I add.\n47 + 86 =", "133"),
        ("7/0", "error: division by zero"),
        ("133", None),
        ("\\boxed{47+86}", None),
        ("47+86\nso 133", None),
        ("-133", None),
        ("47+", None),
        ("(47+86)*2 =", "266"),
    ],
)
def test_the_plain_format_takes_the_last_line(turn: str, said: str | None) -> None:
    assert Calculator(TASK, {"format": "plain"}).step(turn).observation == said


def test_a_long_line_is_no_expression_at_once() -> None:
    """Of all pairs of its places one expression tried each, for hours: a policy's turn held the worker."""
    tool = Calculator(TASK, {"format": "plain"})
    for line in ("1+" * 200_000 + "x", "1" + ") " * 200_000 + "1", "1 " * 200_000 + "+"):
        assert within(60.0, lambda line=line: tool.step(line)).observation is None
