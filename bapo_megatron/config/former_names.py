"""Backward compatibility: former names of settings in recipes, command lines and run directories."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

FORMER_LOSSES = {"bapo": "clip"}
"""Former names of ``algorithm.loss``, each with the current one."""


def current_loss(name: str, announce: bool = True) -> str:
    """Current name of the loss ``name``. ``announce``: print a notice if ``name`` is a former one."""
    if not isinstance(name, str) or name not in FORMER_LOSSES:  # wrong types are refused later, with others
        return name
    if announce:
        _notice(f"algorithm.loss={name} is now called {FORMER_LOSSES[name]}")
    return FORMER_LOSSES[name]


def with_current_names(stored: Mapping[str, Any], announce: bool) -> dict[str, Any]:
    """Stored configuration, by dotted names, with current names in place of former ones."""
    changed = {key: current_loss(stored[key], announce) for key in ("algorithm.loss",) if key in stored}
    return {**stored, **changed}


@cache
def _notice(text: str) -> None:
    """Print ``text`` once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice: {text}", file=sys.stderr, flush=True)
