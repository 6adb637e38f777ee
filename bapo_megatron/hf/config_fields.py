"""Fields of a config.json: each of the type that it must have, else KeyError or ValueError names it."""

from __future__ import annotations

from typing import Any


def integer(config: dict[str, Any], field: str) -> int:
    """A field's integer. KeyError if it is missing, ValueError, with the field, if it holds anything else."""
    if type(config[field]) is not int:
        raise ValueError(f"{field}={config[field]!r:.80} is not an integer")
    return int(config[field])


def real(config: dict[str, Any], field: str) -> float:
    """A field's number, an integer too. KeyError and ValueError as of ``integer``."""
    if type(config[field]) not in (int, float):
        raise ValueError(f"{field}={config[field]!r:.80} is not a number")
    return float(config[field])


def flag(config: dict[str, Any], field: str) -> bool:
    """A field that is true or false; false where it is missing or null. ValueError as of ``integer``."""
    value = config.get(field)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{field}={value!r:.80} is neither true nor false (without quotation marks)")
    return bool(value)


def table(config: dict[str, Any], field: str) -> dict[str, Any]:
    """A field's object; empty where it is missing or null. ValueError as of ``integer``."""
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{field}={value!r:.80} is not an object")
    return value
