"""Parser of tool calls in the text of a model turn; pure functions.

``tool_calls(turn)`` returns its calls as ``Call`` objects, ``without_calls(turn)`` the remaining text. Reads
the call formats of the chat templates of the supported models:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                          Qwen, Hermes
    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>             Qwen3-Coder
    {"name": "add", "parameters": {"a": 1}}, alone, maybe behind <|python_tag|>            Llama 3.1, 3.2

Imports only the standard library: an environment may run in a separate interpreter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
"""Calls of Qwen and Hermes models. The last may be open: its end is the token that ended the turn."""

_BEGINS = re.compile(r"\s*<function=[^<>\n]+>")
_PART = re.compile(r"<function=([^<>\n]+)>|<parameter=([^<>\n]+)>\n?(.*?)(?:\n?</parameter>|(\Z))", re.DOTALL)
"""A function or one of its arguments. One line break on either side of a value is the template's. Names
exclude ``<``, since matching many starts to the end of the turn would take quadratic time."""
_NEXT = re.compile(r"^\s{0,9}<(?:parameter|function)=[^<>\n]+>", re.MULTILINE)
"""A line within an unclosed value that starts the next part. Elsewhere in a line it is text."""
_TAG = re.compile(r"</?think>")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_PYTHON_TAG = "<|python_tag|>"

Tools = Sequence[Any]
"""Tool schemas in OpenAI's chat completions format, which give the types of arguments."""


@dataclass(frozen=True)
class Call:
    """Tool call in a turn: name and arguments, or ``problem`` if it is malformed."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Error for the model; None for a valid call."""


def answer_part(turn: str) -> str:
    """Return the turn without its thinking part, even an unclosed one, so that calls within it do not count.
    A thinking tag within a call's argument is text."""
    for whole in (turn, turn.partition("</think>")[2]):  # Llama call
        if _TAG.search(whole) and any(call.problem is None for call in _object_alone(whole)):
            return whole
    before, thought, _ = _with_plain_arguments(turn).partition("</think>")
    text = turn[len(before + thought) :] if thought else turn
    plain = _with_plain_arguments(text)
    before, thought, behind = plain.rpartition("</think>")
    start = len(before + thought)
    return text[start : start + len(behind.partition("<think>")[0])]


def _with_plain_arguments(text: str) -> str:
    """Return the text, at equal length, with thinking tags in call arguments blanked."""
    return _CALL.sub(_without_tags_in_arguments, text) if _TAG.search(text) else text


def _without_tags_in_arguments(match: re.Match[str]) -> str:
    """Blank thinking tags in one call block. An incomplete call, within a thought, keeps its tags."""
    text = match[0]
    if not _TAG.search(text) or any(call.problem for call in _calls(match, ())):
        return text
    if _BEGINS.match(match[1]):
        return _PART.sub(lambda part: _blank(part[0]), text)
    return _blank(text)


def _blank(text: str) -> str:
    return _TAG.sub(lambda tag: " " * len(tag[0]), text)


def tool_calls(turn: str, tools: Tools | None = None) -> list[Call]:
    """Return the calls of a turn in order. ``tools``: callable tools, None if unknown, empty for none."""
    text = answer_part(turn)
    calls = [call for match in _CALL.finditer(text) for call in _calls(match, tools or ())]
    return calls or (_object_alone(text) if tools is None or tools else [])


def without_calls(turn: str) -> str:
    """Return the text of a turn that has calls, without these and the thinking part. Malformed calls stay, so
    that an agent program sees them. Empty for a turn that is a bare JSON object."""
    text = answer_part(turn)
    if not _CALL.search(text):
        return ""
    return _CALL.sub(
        lambda match: match[0] if any(call.problem for call in _calls(match, ())) else "", text
    ).strip()


def _calls(match: re.Match[str], tools: Tools) -> list[Call]:
    """Return the calls of a block: one, or each function in Qwen3-Coder's format."""
    text, is_closed = match[1], bool(match[2])
    if _BEGINS.match(text):
        return _functions(text, is_closed, tools)
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [Call(problem=f"the tool call is not JSON: {error}")]
    return [_call_of(call, "arguments")]


def _functions(text: str, is_closed: bool, tools: Tools) -> list[Call]:
    """Return the calls of a Qwen3-Coder block. An argument without its end tag is an error, since its end is
    unknown, except where the turn ends with it."""
    calls: list[Call] = []
    types: dict[str, Any] = {}
    for part in _PART.finditer(text):
        if part[1] is not None:
            calls.append(Call(part[1].strip()))
            types = _types(calls[-1].name, tools)
            continue
        key, value, call = part[2].strip(), part[3], calls[-1]
        is_cut = part[4] is not None and (is_closed or value.rstrip().endswith("</function>"))
        if is_cut or _NEXT.search(value):
            calls[-1] = Call(problem=f"the argument {key!r} of {call.name!r} has no </parameter>")
        elif call.problem is None:
            call.arguments[key] = typed(value, types.get(key))
    return calls


def _call_of(call: Any, field: str) -> Call:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(problem='the tool call is not an object with a "name"')
    arguments = call.get(field, {})
    if not isinstance(arguments, dict):
        return Call(problem=f'the "{field}" of the tool call are not an object')
    return Call(call["name"], arguments)


def _object_alone(text: str) -> list[Call]:
    """Return the call of a Llama model, whose whole turn is an object; empty for an answer."""
    stripped = text.strip()
    is_tagged, body = stripped.startswith(_PYTHON_TAG), stripped.removeprefix(_PYTHON_TAG)
    if not is_tagged and not (body.startswith("{") and body.endswith("}")):
        return []
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [Call(problem=f"the tool call is not JSON: {error}")] if is_tagged else []
    call = _call_of(value, "parameters")
    is_call = call.problem is None and "parameters" in value
    return [call] if is_call or is_tagged else []


def _types(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            known = properties.items() if isinstance(properties, dict) else ()
            return {key: schema.get("type") for key, schema in known if isinstance(schema, dict)}
    return {}


def typed(value: str, kind: Any) -> Any:
    """Parse an unquoted value: text, unless the schema has another type and the value parses."""
    if kind is None or kind == "string":
        return value
    try:
        return _PYTHON_WORDS[value] if value in _PYTHON_WORDS else json.loads(value)
    except (ValueError, RecursionError):
        return value


def arguments(turn: str, tool: str, name: str) -> list[str | ValueError]:
    """Return the text argument ``name`` of each call of ``tool`` in a turn, or an error for the model."""
    return [_argument(call, tool, name) for call in tool_calls(turn)]


def _argument(call: Call, tool: str, name: str) -> str | ValueError:
    if call.problem:
        return ValueError(call.problem)
    if call.name != tool:
        return ValueError(f"there is no tool {call.name!r}; the tool is {tool!r}")
    value = call.arguments.get(name)
    return value if isinstance(value, str) else ValueError(f"{tool} takes one argument, {name!r}, a text")


def results(texts: list[str]) -> str | list[str]:
    """Return the observation for the results of a turn's calls: one message each."""
    return texts[0] if len(texts) == 1 else texts
