"""Access to an SGLang server: its API key out of a file, private sockets, and no key in its log.

The launchers of this folder call it in the server's process. SGLang checks the key itself
(``srt/utils/auth.py``): everything asks for it but paths that begin with /health, /ready or /metrics.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import api_key  # this folder comes first on the path


def install() -> str | None:
    """Harden this process: private sockets and files, and an API key that is redacted in the log; returns it.

    There is no key without ``api_key.VARIABLE``. Called at the top of the launcher, because the worker
    processes that SGLang spawns import the launcher again.
    """
    os.umask(0o077)  # SGLang's ZMQ sockets unpickle what they receive: only this user may connect
    if not (named := os.environ.get(api_key.VARIABLE)):
        return None
    key: str = api_key.read_key_file(Path(named)).value
    logging.setLogRecordFactory(_redacting(logging.getLogRecordFactory(), key))
    return key


def _redacting(make: Callable[..., logging.LogRecord], key: str) -> Callable[..., logging.LogRecord]:
    """A log record factory without the key: SGLang logs all its settings at start, the key among them."""

    def redacted(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = make(*arguments, **more)
        try:
            text = record.getMessage()
        except Exception:  # a record that cannot be formatted is reported by its handler
            return record
        if key in text:
            record.msg, record.args = text.replace(key, "***"), None
        return record

    return redacted


def with_key(arguments: Any, key: str | None) -> Any:
    """Server settings (``ServerArgs``) that require the key; unchanged if there is none."""
    if key is not None:
        arguments.api_key = key
    return arguments
