"""A configuration with other values, named as flags name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any


def altered(section: Any, changes: Mapping[str, Any]) -> Any:
    """``section`` with ``changes``: dotted names of fields, and their values."""
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        inner = altered(getattr(section, first), {rest: value}) if rest else value
        section = replace(section, **{first: inner})
    return section
