"""Targets of `logging.on_event`: a command, a webhook URL, or `$NAME`, an environment variable with either.

The event sender delivers each message to a target by ``send``, which blocks for at most 20 s and raises
Refused if the target does not accept it. A command reads the message as JSON on standard input; a URL
receives it as a JSON POST, whose field `text` Slack, Mattermost and compatible services show. URLs may be
secret: no error text contains one, and `$NAME` keeps them out of the run directory. ``target_problems``
yields errors of the setting, before a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

from bapo_megatron.runtime.child_process import ChildDied, UserCommand, command_words, missing_program, within
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.http import ask

LIMIT_S = 20.0
"""Time limit of one message, seconds."""

_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")


class Refused(Exception):
    """Raised by ``send`` when a target does not accept a message. The text contains no URL."""


def target_problems(targets: Sequence[str]) -> Iterator[str]:
    """Yield errors of the targets on this machine: an invalid URL, a missing variable or program."""
    for target in targets:
        value = resolved(target)
        if not value and _VARIABLE.fullmatch(target):
            problem: str | None = "that variable is not set"
        else:
            problem = _form_problem(value) or (None if _is_url(value) else missing_program(value))
            if problem and value != target:  # the value may be a secret
                problem = "its value is neither a URL (https://...) nor a program that is here"
        if problem:
            yield f"logging.on_event={shown(target)}: {problem}; give a command, a URL, or an exported $NAME"


def resolved(target: str) -> str:
    """Return a target's command or URL: its variable's value, or itself; empty if the variable is not set."""
    variable = _VARIABLE.fullmatch(target)
    return (environment_variable(variable[1]) or "").strip() if variable else target


def send(target: str, message: dict[str, Any], log: Path, limit_s: float = LIMIT_S) -> None:
    """Deliver a message. Raises Refused if the target does not accept it within ``limit_s`` seconds. ``log``:
    file to which a command's output is appended."""
    value, data = resolved(target), json.dumps(message).encode()
    if not value:
        raise Refused(f"{target} is not set")
    if not _is_url(value):
        _run(value, message, data, log, limit_s)
        return
    try:
        # In a fork with a deadline: a server that sends a byte per second never hits a socket timeout.
        refusal = within(limit_s, lambda: _post(value, data, limit_s))
    except (ChildDied, OSError) as error:  # NoAnswer is one; or no memory for a fork
        refusal = str(error)
    if refusal:
        raise Refused(refusal.replace(value, "the URL"))


def _run(command: str, message: dict[str, Any], data: bytes, log: Path, limit_s: float) -> None:
    about = {
        "BAPO_EVENT": str(message["event"]["kind"]),
        "BAPO_EVENT_TEXT": message["text"],
        "BAPO_RUN_DIR": message["run_dir"],
    }
    try:
        running = UserCommand(command_words(command), about, log, data, append=True)
    except (OSError, ValueError) as error:
        raise Refused(f"it cannot be started: {error}") from None
    try:
        code = running.wait(limit_s)
        if code != 0:
            raise Refused(running.failure(code, f"{limit_s:.3g} s"))
    finally:
        running.close()


def _post(url: str, data: bytes, limit_s: float) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": "bapo-megatron"}
    try:
        answer = ask(url, data, headers, timeout_s=limit_s, proxies=True)
    except URLError as error:
        return str(error.reason)
    except (HTTPException, ValueError) as error:
        return type(error).__name__  # their texts may quote the path
    except OSError as error:
        return str(error)
    return "" if answer.status and answer.status < 300 else f"HTTP {answer.status} {answer.reason}"


def _is_url(value: str) -> bool:
    return value.lower().startswith(("http://", "https://"))


def _form_problem(value: str) -> str | None:
    try:
        if not _is_url(value):
            command_words(value)
            return None
        is_wrong = not urlsplit(value).hostname or re.search(r"[\s\x00-\x1f\x7f]", value)
    except ValueError as error:
        return "it is no URL" if _is_url(value) else str(error)
    return "the URL has no host, or a blank in it" if is_wrong else None


def shown(target: str) -> str:
    """Return a target for messages: of a URL only scheme and host."""
    if not _is_url(target):
        return repr(target)
    return re.sub(r"(?i)(https?://)(?:[^/@]*@)?([^/?#]*).*", r"\1\2/...", target, flags=re.DOTALL)
