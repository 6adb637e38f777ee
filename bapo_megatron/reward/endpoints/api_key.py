"""API key of an endpoint: read from an environment variable, never printed.

Used in ``rollout/`` and this folder.
"""

from __future__ import annotations

import os
import re

from bapo_megatron.errors import printable

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_SHOWN_CHARACTERS = 300


def key_problem(variable: str) -> str | None:
    """Error of the name of the variable, or None. The text leaves the name out: it may be the key itself."""
    if variable and not _NAME.fullmatch(variable):
        return "it must be the name of an environment variable that holds the key, not the key itself"
    return None


def key_of(variable: str) -> str:
    """Key in the environment variable; empty without a variable or a name."""
    return os.environ.get(variable, "").strip() if variable else ""


def without_key(text: str, key: str) -> str:
    """Text of a server, for a message: shortened, redacted, without control characters."""
    return printable(" ".join(redacted(text, key).split()))[:_SHOWN_CHARACTERS]


def redacted(text: str, key: str) -> str:
    """``text`` with the key replaced."""
    return text.replace(key, "[key]") if key else text
