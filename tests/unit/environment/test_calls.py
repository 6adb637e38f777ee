"""Tool calls in a turn, and the messages and tools of three protocols, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bapo_megatron.environment.protocols import chat, server
from bapo_megatron.environment.tools.calls import Call, answer_part, arguments, tool_calls, without_calls
from tests.support.chat_templates import family_tokenizer
from tests.support.pages import ROOT

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        (f"text {ADD} more {ADD}", [Call("add", {"a": "1"})] * 2),
        ('<tool_call>{"name": "add"}', [Call("add", {})]),
        (f"<think>{ADD}</think>done", []),
        (f"<think>I could {ADD}", []),
        ("<tool_call>[1]</tool_call>", [Call(problem='the tool call is not an object with a "name"')]),
        (
            '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
            [Call(problem='the "arguments" of the tool call are not an object')],
        ),
    ],
)
def test_calls_of_a_turn(turn: str, calls: list[Call]) -> None:
    assert tool_calls(turn) == calls


CODER = "<tool_call>\n<function=run>\n{}</function>\n</tool_call>"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "run",
        "parameters": {
            "properties": {
                "code": {"type": "string"},
                "times": {"type": "integer"},
                "fast": {"type": "boolean"},
                "of": {"type": ["array", "null"]},
            }
        },
    },
}


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def test_calls_of_qwen3_coder() -> None:
    """Values without quotes, of several lines, with tags in them; types by the schema, where there is one."""
    code = "\nif x:\n    print('</function> <parameter=', \"ä\")\n"
    turn = CODER.format(parameter("code", code) + parameter("times", "3") + parameter("fast", "True"))
    assert tool_calls(f"I run it. {turn}") == [Call("run", {"code": code, "times": "3", "fast": "True"})]
    assert tool_calls(turn, [SCHEMA]) == [Call("run", {"code": code, "times": 3, "fast": True})]
    assert without_calls(f"I run it. {turn}") == "I run it."
    mistyped = CODER.format(parameter("times", "three") + parameter("of", "[1]"))
    assert tool_calls(mistyped, [SCHEMA]) == [Call("run", {"times": "three", "of": [1]})]
    assert tool_calls("<tool_call>\n<function=run>\n<parameter=code>\n1") == [Call("run", {"code": "1"})]
    # A name ends where another argument begins: else each of many beginnings is read to the turn's end.
    begun = "<parameter=" * 3 + "a>1</parameter>"
    assert tool_calls(CODER.format(begun)) == [Call("run", {"a": "1"})]
    for odd in ([None], [{"function": {"name": "run", "parameters": 5}}]):
        assert tool_calls(mistyped, odd) == [Call("run", {"times": "three", "of": "[1]"})]


def function(name: str, *parameters: str) -> str:
    return f"<function={name}>\n{''.join(parameters)}</function>\n"


def test_two_functions_of_a_block_are_two_calls() -> None:
    block = function("run", parameter("times", "1")) + function("see", parameter("times", "5"))
    calls = tool_calls(f"<tool_call>\n{block}</tool_call>", [SCHEMA])
    assert calls == [Call("run", {"times": 1}), Call("see", {"times": "5"})]
    assert without_calls(f"Both. <tool_call>\n{block}</tool_call>") == "Both."
    quoted = parameter("code", "s = '<function=see> <parameter=a>'")
    assert tool_calls(f"<tool_call>{function('run', quoted)}</tool_call>") == [
        Call("run", {"code": "s = '<function=see> <parameter=a>'"})
    ]


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ([parameter("a", "1"), "<parameter=b>\n2\n"], "b"),
        (["<parameter=a>\n1\n", parameter("b", "2")], "a"),
        (["<parameter=a>\n1\n</function>\n<function=see>\n", parameter("b", "2")], "a"),
    ],
)
@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_an_argument_without_its_end_is_a_problem(parameters: list[str], name: str, end: str) -> None:
    """It would swallow what follows. ``end``: the token of the turn may be the end of the block."""
    [call] = tool_calls(f"<tool_call>\n{function('run', *parameters)}{end}")
    assert call.problem == f"the argument '{name}' of 'run' has no </parameter>"


@pytest.mark.parametrize(
    "thought", ["", "<think>Hm.</think>\n", "Could <tool_call> it.</think>", "Hm.</think>"]
)
@pytest.mark.parametrize("code", ["print('</think>')", "'<think>'", "'<think></think><think>'"])
def test_a_tag_of_a_thought_within_an_argument_is_text(thought: str, code: str) -> None:
    arguments = json.dumps({"code": code})
    for written in (
        f'<tool_call>{{"name": "run", "arguments": {arguments}}}</tool_call>',
        CODER.format(parameter("code", code)),
        f'{{"name": "run", "parameters": {arguments}}}',
    ):
        assert tool_calls(thought + written) == [Call("run", {"code": code})]
        thought_of = f"<think>{written}</think>5"
        assert (tool_calls(thought_of), answer_part(thought_of)) == ([], "5")
        assert tool_calls(f"<think>{written}") == []


def test_json_that_is_nested_without_end_is_a_problem() -> None:
    [call] = tool_calls("<tool_call>" + "[" * 100_000)
    assert str(call.problem).startswith("the tool call is not JSON: ")


def test_calls_of_llama() -> None:
    """The whole turn is an object; where nothing may be called it is an answer."""
    written = '{"name": "add", "parameters": {"a": "1"}}'
    for turn in (written, f"<|python_tag|>{written}", f"<think>Hm.</think>\n{written}\n"):
        assert tool_calls(turn) == tool_calls(turn, [SCHEMA]) == [Call("add", {"a": "1"})]
        assert tool_calls(turn, []) == []
        assert without_calls(turn) == ""
    for answer in ('{"name": "Ada"}', "{x}", '{"name": "add", "parameters": 5}', f"{written} I say."):
        assert tool_calls(answer) == []
    [broken] = tool_calls("<|python_tag|>print(1)")
    assert str(broken.problem).startswith("the tool call is not JSON: ")


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2.5", "Llama 3.1"])
def test_the_calls_that_a_template_writes_are_read(family: str) -> None:
    """As the template itself shows the model's earlier calls, with the thinking part that it may begin."""
    arguments = {"code": "print('ä </b>', \"x\")\ny"}
    call = {"type": "function", "function": {"name": "python", "arguments": arguments}}
    question = {"role": "user", "content": "?"}
    messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = family_tokenizer(family)
    prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith(prompt)
    turn = text.removeprefix(prompt).rstrip().removesuffix(tokenizer.eos_token)
    assert tool_calls(turn) == [Call("python", arguments)]


QUESTION = {"role": "user", "content": "What is 2^100?"}
PROMPT = (ROOT / "recipes/prompts/qwen_python.txt").read_text()


def tool() -> dict[str, Any]:
    """The tool as the prompt declares it."""
    found: dict[str, Any] = json.loads(PROMPT.partition("<tools>\n")[2].partition("\n</tools>")[0])
    return found


def test_the_prompt_names_the_call_that_the_tool_answers() -> None:
    [name] = tool()["function"]["parameters"]["required"]
    call = json.dumps({"name": tool()["function"]["name"], "arguments": {name: "print(2)"}})
    assert arguments(f"<tool_call>\n{call}\n</tool_call>", "python", "code") == ["print(2)"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2.5"])
def test_the_prompt_is_what_the_template_makes_of_the_tool(family: str) -> None:
    """Of the first paragraph and ``tools``: token by token what the model was trained to read."""
    template = family_tokenizer(family).apply_chat_template
    first, _, rest = PROMPT.partition("\n\n")
    assert rest.startswith("# Tools")
    ours = template([{"role": "system", "content": PROMPT.rstrip("\n")}, QUESTION], tokenize=False)
    theirs = template([{"role": "system", "content": first}, QUESTION], tools=[tool()], tokenize=False)
    assert ours == theirs
    assert '"name": "python"' in theirs


def test_what_is_said_apart_in_three_protocols_is_a_chat() -> None:
    """Thoughts are not the policy's input, and a system's text is a message. (Calls and their results as the
    clients send them: test_public_environments.py.)"""
    turn = {"role": "assistant", "content": "Hm."}
    system, text = {"role": "system", "content": "Be brief."}, {"type": "text", "text": "Be brief."}
    thought = [{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "Hm."}]
    items = [QUESTION, {"type": "reasoning", "summary": []}, {"type": "message", **turn}, QUESTION]
    none = {"tool_choice": "none"}
    bodies = [
        {"messages": [system, QUESTION, turn, QUESTION], **none},
        {"instructions": "Be brief.", "input": items, **none},
        {
            "system": [{**text, "cache_control": {"type": "ephemeral"}}],
            "messages": [QUESTION, {"role": "assistant", "content": thought}, QUESTION],
            "tool_choice": {"type": "none"},
        },
    ]
    for protocol, body in zip(server.PROTOCOLS.values(), bodies, strict=True):
        assert protocol.read(body) == chat.ChatRequest(
            [system, QUESTION, turn, QUESTION], [], takes_calls=False
        )
