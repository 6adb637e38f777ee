"""Texts without the keys of this process's environment: what a package prints may hold them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TextIO

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_LEAST_CHARACTERS = 6
_IN_ADDRESSES = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=write_token=)[^&\s'\"]+")
_HIDDEN = "***"


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` without values of variables that are named as keys, and without passwords of addresses."""
    for name, value in environment.items():
        if _NAMES.search(name) and len(value) >= _LEAST_CHARACTERS:
            text = text.replace(value, _HIDDEN)
    return _IN_ADDRESSES.sub(_HIDDEN, text)


class DiscreetStream:
    """A text stream that writes ``without_secrets``; all else is the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(without_secrets(text))
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
