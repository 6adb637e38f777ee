"""Table of settings that were removed, ``REMOVED``: former default, and advice to users who still set them.

A run that has the default continues without the setting (``without_removed``). For another value, or a recipe
or flag that sets it, callers raise ConfigError with the advice (``removed_settings``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_REPAIR = (
    "no study showed a gain: leave it out, or start c_low higher, algorithm.bounds.low_start=0.8; the code "
    "is at commit f6aa2582"
)

REMOVED: dict[str, tuple[Any, str]] = {
    "algorithm.bounds.negative_weight": ("present", _REPAIR),
    "algorithm.bounds.low_within_batch": ("searched", _REPAIR),
}
"""By dotted name: the former default, and what to do instead."""


def without_removed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration without those removed settings that have their former default."""
    return {name: value for name, value in stored.items() if REMOVED.get(name, (REMOVED,))[0] != value}


def removed_settings(names: Iterable[str]) -> list[str]:
    """Return the advice for each of ``names`` (dotted, or its last part) that is a removed setting."""
    asked = {name.replace("-", "_") for name in names}
    return [
        f"{name} is gone: {instead}"
        for name, (_, instead) in REMOVED.items()
        if {name, name.rpartition(".")[2]} & asked
    ]
