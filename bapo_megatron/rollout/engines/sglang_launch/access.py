"""Access control inside an SGLang server process: API key from a file, private sockets, no key in the log.

A launcher calls ``install()`` and passes the key that it returns to SGLang (``serve``), which checks it
(``srt/utils/auth.py``) on all paths but those that begin with /health, /ready or /metrics.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import api_key  # this folder is first on sys.path


def install() -> str | None:
    """Make this process's sockets and files private and redact its API key in the log; returns the key, or
    None without one. Called at a launcher's top level, which SGLang's spawned workers import again."""
    os.umask(0o077)  # SGLang's ZMQ sockets unpickle what they receive: only this user may connect
    if not (named := os.environ.get(api_key.VARIABLE)):
        return None
    key: str = api_key.read_key_file(Path(named)).value
    logging.setLogRecordFactory(_redacting(logging.getLogRecordFactory(), key))
    return key


def serve(key: str | None) -> None:
    """Run a server with this process's flags and the key, as ``sglang.launch_server`` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        arguments = prepare_server_args(sys.argv[1:])
        arguments.api_key = key
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _redacting(make: Callable[..., logging.LogRecord], key: str) -> Callable[..., logging.LogRecord]:
    """Return a log record factory that redacts the key: SGLang logs all settings at start, with the key."""

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
