"""Tool calls in a turn, by hand."""

from __future__ import annotations

import pytest

from bapo_megatron.environment.tools.calls import Call, argument, tool_calls, without_calls

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        ("no call", []),
        (f"text {ADD} more {ADD}", [Call("add", {"a": "1"})] * 2),
        ('<tool_call>{"name": "add"}', [Call("add", {})]),
        (f"<think>{ADD}</think>done", []),
        ("<tool_call>[1]</tool_call>", [Call(problem='the tool call is no object with a "name"')]),
        ('<tool_call>{"name": 1}</tool_call>', [Call(problem='the tool call is no object with a "name"')]),
        (
            '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
            [Call(problem='the "arguments" of the tool call are no object')],
        ),
    ],
)
def test_calls_of_a_turn(turn: str, calls: list[Call]) -> None:
    assert tool_calls(turn) == calls


def test_json_that_is_nested_without_end_is_a_problem() -> None:
    [call] = tool_calls("<tool_call>" + "[" * 100_000)
    assert call.problem is not None
    assert call.problem.startswith("the tool call is no JSON: ")


def test_the_text_beside_the_calls() -> None:
    assert without_calls(f"<think>Hm.</think>\n\nI add. {ADD}") == "I add."


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (Call("sub", {"a": "1"}), "there is no tool 'sub'; the tool is 'add'"),
        (Call("add", {}), "add takes one argument, 'a', a text"),
        (Call("add", {"a": 1}), "add takes one argument, 'a', a text"),
        (Call(problem="broken"), "broken"),
    ],
)
def test_another_call_is_an_error_for_the_model(call: Call, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        argument(call, "add", "a")
    assert argument(Call("add", {"a": "1"}), "add", "a") == "1"
