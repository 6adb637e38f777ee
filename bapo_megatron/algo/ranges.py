"""Ranges of numbers that annotations state, as ``Annotated[float, Gt(0)]``: in words, and checked."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

from annotated_types import Ge, Gt, Le, Lt

_LIMITS: dict[type, tuple[str, Callable[[Any, Any], bool]]] = {
    Ge: ("at least", operator.ge),
    Gt: ("above", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("below", operator.lt),
}


def range_words(annotation: Any) -> str:
    """The range in words, ``at least 0 and below 1``; empty if the annotation states none."""
    return " and ".join(f"{words} {bound}" for words, _, bound in _limits(annotation))


def range_problem(value: Any, annotation: Any) -> str | None:
    """What is wrong with a number, as the end of a sentence; None for a sound one, and for no number."""
    if not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value):
        return "is not a finite number"
    if all(holds(value, bound) for _, holds, bound in _limits(annotation)):
        return None
    return f"must be {range_words(annotation)}"


def _limits(annotation: Any) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
    """Words, comparison and bound of every limit."""
    metadata = getattr(annotation, "__metadata__", ())
    return [
        (*_LIMITS[type(limit)], *dataclasses.astuple(limit)) for limit in metadata if type(limit) in _LIMITS
    ]
