"""Names of earlier versions that recipes, command lines and run directories may still hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

FORMER_LOSSES = {"bapo": "clip"}
"""Former names of ``algorithm.loss``, each with the present one."""


def current_loss(name: str, announce: bool = True) -> str:
    """The present name of the loss ``name``; with a notice of one line, unless told not to, if it changed."""
    if not isinstance(name, str) or name not in FORMER_LOSSES:  # wrong types are refused later, with others
        return name
    if announce:
        _notice(f"algorithm.loss={name} is now called {FORMER_LOSSES[name]}")
    return FORMER_LOSSES[name]


def with_current_names(stored: Mapping[str, Any], announce: bool) -> dict[str, Any]:
    """A stored configuration, by dotted names, with the present names in place of former ones."""
    changed = {key: current_loss(stored[key], announce) for key in ("algorithm.loss",) if key in stored}
    return {**stored, **changed}


@cache
def _notice(text: str) -> None:
    """Print ``text`` once, on rank 0 of those that a launcher started."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice: {text}", file=sys.stderr, flush=True)
