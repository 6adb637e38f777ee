"""Removed settings of earlier versions, ``REMOVED``: former default, and advice for a user who sets it.

A run with the default continues without the setting (``without_removed``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_REPAIR = (
    "no study showed a gain: leave it out, or start c_low higher, algorithm.bounds=floored(); the code is at "
    "commit f6aa2582"
)

REMOVED: dict[str, tuple[Any, str]] = {
    "algorithm.bounds.negative_weight": ("present", _REPAIR),
    "algorithm.bounds.low_within_batch": ("searched", _REPAIR),
}
"""By dotted names: the default then, and what to do instead."""


def without_removed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration without settings that are gone, where they have their default."""
    return {name: value for name, value in stored.items() if REMOVED.get(name, (REMOVED,))[0] != value}


def removed_settings(names: Iterable[str]) -> list[str]:
    """For each of the names that is gone, as a dotted name or its last part, what to do instead."""
    asked = {name.replace("-", "_") for name in names}
    return [
        f"{name} is gone: {instead}"
        for name, (_, instead) in REMOVED.items()
        if {name, name.rpartition(".")[2]} & asked
    ]
