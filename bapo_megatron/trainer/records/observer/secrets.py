"""Redaction of secrets (API keys, passwords in URLs) in what a tracker's package prints or raises.

Used in the observers' processes, for their logs, their problems, and the configuration that trackers get.
Used by ``__main__.py``, ``following.py`` and ``tracker.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TextIO

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_LEAST_CHARACTERS = 6
_IN_ADDRESSES = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=write_token=)[^&\s'\"]+")
_HIDDEN = "***"


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` with *** for values of variables whose names say KEY or TOKEN, and for passwords in URLs."""
    for name, value in environment.items():
        if _NAMES.search(name) and len(value) >= _LEAST_CHARACTERS:
            text = text.replace(value, _HIDDEN)
    return _IN_ADDRESSES.sub(_HIDDEN, text)


class RedactingStream:
    """Text stream that redacts secrets before it writes; all other methods are the stream's.

    ``__main__.py`` puts it in place of an observer's standard output and error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redacted(text))
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
