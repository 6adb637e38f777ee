"""Validated fields of a dataset row in the schema of Skywork-OR1-RL-Data; each function raises RowError.

Used in ``commands/doctor/``, this folder, ``data/prepare/`` and ``evaluation/``.
"""

from __future__ import annotations

import json
from typing import Any

from bapo_megatron.data.rows import Row

_RAW = {"problem", "question"}
"""Columns of a raw dataset, which `bapo data prepare` converts."""


class RowError(Exception):
    """Invalid dataset row; callers add the file and the row's number, and raise ConfigError or count it."""


def field_of(row: Row, name: str, kind: type, kind_name: str) -> Any:
    """Value of ``row[name]``. RowError if it is not of type ``kind``."""
    value = row.get(name)
    if not isinstance(value, kind):
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise RowError(f"{name} is {found}; it must be {kind_name}")
    return value


def messages_of(row: Row) -> list[dict[str, str]]:
    """Chat messages of the row's ``prompt``. RowError if there are none or one is empty."""
    if "prompt" not in row and _RAW & {name.lower() for name in row}:
        raise RowError(
            f"prompt is missing; the row has {', '.join(sorted(row))}: `bapo data prepare FILE --output DIR` "
            f"converts such rows"
        )
    messages: list[dict[str, str]] = field_of(row, "prompt", list, "a list of {role, content}")
    if not messages:
        raise RowError("prompt is empty; it must hold at least one message {role, content}")
    for message in messages:
        if not isinstance(message, dict):
            raise RowError(f"prompt holds {message!r}; a message must be {{role, content}}")
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str) or not value.strip():
                raise RowError(f"prompt has a message whose {key} is {value!r}; it must be text, not empty")
    return messages


def ground_truth_of(row: Row, several: bool = False) -> str:
    """Ground truth of the row, ``reward_model.ground_truth``, as text: one answer, or the tests of a program.

    ``several``: a list of answers is allowed, too, as JSON, for a user's reward function.
    """
    value = field_of(row, "reward_model", dict, 'an object with "ground_truth"').get("ground_truth")
    answer = _unwrapped(value, several)
    if not isinstance(answer, str) or not answer.strip():
        raise RowError(f"reward_model.ground_truth is {value!r}; it must be the answer as text, not empty")
    return answer


def _unwrapped(value: object, several: bool) -> object:
    """Answer inside ``'["34"]'``, Skywork's form of some answers; any other value unchanged."""
    inner: object = value
    if isinstance(value, str) and value.lstrip().startswith('["'):
        try:
            inner = json.loads(value)
        except ValueError:
            return value
    if isinstance(inner, list) and all(isinstance(item, str) for item in inner):
        if len(inner) > 1 and all(item.lstrip().startswith("assert") for item in inner):
            return json.dumps(inner)  # the tests of a code problem
        if len(inner) != 1 and several:
            return value if isinstance(value, str) else json.dumps(inner, ensure_ascii=False)
        if len(inner) != 1:
            raise RowError(f"reward_model.ground_truth is {value!r}, {len(inner)} answers; give one")
        return inner[0]
    return value


def extra_info_of(row: Row) -> dict[str, Any]:
    """The row's ``extra_info`` as plain JSON, without keys of other rows (Arrow fills those with None)."""
    info = row.get("extra_info")
    if info is not None and not isinstance(info, dict):
        raise RowError(f"extra_info is of type {type(info).__name__}; it must be an object")
    plain = json.loads(json.dumps(info or {}, default=str))
    return {key: value for key, value in plain.items() if value is not None}
