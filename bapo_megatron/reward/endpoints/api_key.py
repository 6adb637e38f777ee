"""The API key of an endpoint: named by an environment variable, and never printed."""

from __future__ import annotations

import os
import re

from bapo_megatron.errors import printable

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_SHOWN_CHARACTERS = 300


def key_problem(variable: str) -> str | None:
    """What is wrong with the name of the variable, or None. The text does not have it: it may be the key."""
    if variable and not _NAME.fullmatch(variable):
        return "it must be the name of an environment variable that holds the key, not the key itself"
    return None


def key_of(variable: str) -> str:
    """The key in the environment variable; empty if there is none, or no name."""
    return os.environ.get(variable, "").strip() if variable else ""


def without_key(text: str, key: str) -> str:
    """``text`` of a server for a message: shortened, without control characters and without the key."""
    return printable(" ".join(hidden(text, key).split()))[:_SHOWN_CHARACTERS]


def hidden(text: str, key: str) -> str:
    """``text`` without the key."""
    return text.replace(key, "[key]") if key else text
