"""Tool calls in a turn of the model, and the settings of a tool; pure functions on text.

Only the standard library is imported: an environment may run in an interpreter of its own. Used by
``calculator.py``, ``python_tool.py`` and ``environment/adapters/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from bapo_megatron.errors import ConfigError

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call of Qwen and Hermes models. The last may be open: its end is the token that ended the turn."""

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One tool call, as plain data. Made by ``tool_calls``."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why it is no call, for the model; None if it is one."""


def answer_part(turn: str) -> str:
    """The turn without its thinking part: a call that is only thought of is none."""
    return turn.rpartition("</think>")[2]


def tool_calls(turn: str) -> list[Call]:
    """The calls of a turn, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, in their order."""
    return [_call(found) for found in _CALL.findall(answer_part(turn))]


def without_calls(turn: str) -> str:
    """The text of a turn beside its calls and its thinking part. What is no call, only begun as one, stays:
    who reads the text can say what is wrong with it."""
    return _CALL.sub(lambda found: found[0] if _call(found[1]).problem else "", answer_part(turn)).strip()


def _call(text: str) -> Call:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the tool call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(problem='the tool call is no object with a "name"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(problem='the "arguments" of the tool call are no object')
    return Call(call["name"], arguments)


def argument(call: Call, tool: str, name: str) -> str:
    """The text argument ``name`` of a call of ``tool``. ValueError, for the model, if it is another call."""
    if call.problem:
        raise ValueError(call.problem)
    if call.name != tool:
        raise ValueError(f"there is no tool {call.name!r}; the tool is {tool!r}")
    value = call.arguments.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{tool} takes one argument, {name!r}, a text")
    return value


def settings_of(kind: type[T], settings: Mapping[str, Any]) -> T:
    """``settings`` as a dataclass whose fields have defaults. ConfigError for an unknown name or type."""
    hints, known = get_type_hints(kind), [one.name for one in fields(kind)]  # type: ignore[arg-type]
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"environment.settings has {name!r}; known are {', '.join(known)}")
        is_number = hints[name] is float and type(value) is int
        if type(value) is not hints[name] and not is_number:
            wanted = hints[name].__name__
            raise ConfigError(f"environment.settings: {name}={value!r} must be of the type {wanted}")
    return kind(**settings)
