"""Validation of values against annotations such as ``Annotated[float, Gt(0)]``: types and ranges.

Used for the fields of a configuration and for the settings of losses and rewards. Functions return an error
as the end of a sentence, or None; they raise nothing. ``settings.py``, ``config/validation.py`` and the
reader of cluster files call them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from typeguard import TypeCheckError, check_type

_LIMITS: dict[type, tuple[str, Callable[[Any, Any], bool]]] = {
    Ge: ("at least", operator.ge),
    Gt: ("above", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("below", operator.lt),
}

_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    tuple: "a list",
    list: "a list",
    dict: "a table",
    type(None): "None",
}


def type_problem(value: Any, annotation: Any) -> str | None:
    """Type error of a value, as the end of a sentence (``must be a number``); None if its type is right."""
    allowed = members(annotation)
    wrong = isinstance(value, bool) and not {bool, Any} & set(allowed)  # which for Python is a number
    try:
        check_type(value, annotation)
    except TypeCheckError:
        wrong = True
    if not wrong:
        return None
    return f"must be {' or '.join(map(_in_words, allowed))}"


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    plain = get_origin(kind) or kind
    return _TYPES[plain] if plain in _TYPES else str(getattr(plain, "__name__", plain))


def members(annotation: Any) -> tuple[Any, ...]:
    """Types that an annotation allows: those of a union, or itself."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def range_words(annotation: Any) -> str:
    """Range of an annotation in words, ``at least 0 and below 1``; empty if it has none."""
    return " and ".join(f"{words} {bound}" for words, _, bound in _limits(annotation))


def range_problem(value: Any, annotation: Any) -> str | None:
    """Range error of a number, as the end of a sentence; None if it is in range, or no number."""
    if not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value):
        return "is not a finite number"
    if all(holds(value, bound) for _, holds, bound in _limits(annotation)):
        return None
    return f"must be {range_words(annotation)}"


def _limits(annotation: Any) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
    """Limits of an annotation: words, comparison and bound of each."""
    metadata = getattr(annotation, "__metadata__", ())
    return [
        (*_LIMITS[type(limit)], *dataclasses.astuple(limit)) for limit in metadata if type(limit) in _LIMITS
    ]
