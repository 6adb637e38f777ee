"""Typed access to config.json fields: ``integer``, ``real``, ``flag``, ``table`` return a field's value.

A missing field is a KeyError in the first two, False or {} in the others; another type a ValueError.
"""

from __future__ import annotations

from typing import Any


def integer(config: dict[str, Any], field: str) -> int:
    """A field's integer. Raises KeyError if it is missing, ValueError, with the field, for any other type."""
    if type(config[field]) is not int:
        raise ValueError(f"{field}={config[field]!r:.80} is not an integer")
    return int(config[field])


def real(config: dict[str, Any], field: str) -> float:
    """A field's number, integers included. Raises KeyError and ValueError like ``integer``."""
    if type(config[field]) not in (int, float):
        raise ValueError(f"{field}={config[field]!r:.80} is not a number")
    return float(config[field])


def flag(config: dict[str, Any], field: str) -> bool:
    """A field's boolean; False if it is missing or null. Raises ValueError like ``integer``."""
    value = config.get(field)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{field}={value!r:.80} is neither true nor false (without quotation marks)")
    return bool(value)


def table(config: dict[str, Any], field: str) -> dict[str, Any]:
    """A field's object; empty if it is missing or null. Raises ValueError like ``integer``."""
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{field}={value!r:.80} is not an object")
    return value
