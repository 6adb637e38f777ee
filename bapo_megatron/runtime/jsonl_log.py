"""JSON-lines logs (metrics.jsonl, events.jsonl): append-only, readable during the run, whole after a kill.

A line is whole once its newline is there. What follows the last newline is the torn end of a write that
was cut short: readers skip it and writers remove it.
"""

from __future__ import annotations

import json
import math
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import append_whole, write_atomically
from bapo_megatron.runtime.storage import writing

Row = dict[str, Any]


class JsonlLog:
    """A JSON-lines file open for appending. Every line is one write call: a kill tears at most one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._one_writer = threading.Lock()
        self._file = path.open("ab", buffering=0)

    def append(self, row: Row) -> None:
        """Write one line. Infinities and NaN become null: strict JSON has no other way to say them.

        RunStopped if the disk does not take it; the lines before it stay.
        """
        with writing("a line", self.path), self._one_writer:  # events come from several threads
            append_whole(self._file, _line(row), self._file.seek(0, os.SEEK_END))

    def rewind(self, step: int) -> None:
        """Truncate the log after ``step``: a resumed run writes the later lines again."""
        lines = _whole_lines(self.path)
        kept = [line for number, line in enumerate(lines, 1) if _step_of(line, self.path, number) <= step]
        if len(kept) == len(lines):
            return
        self._file.close()
        write_atomically(self.path, b"".join(line + b"\n" for line in kept))
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class EventLog(JsonlLog):
    """The event log (events.jsonl): starts, resumes, checkpoints, warnings. Never rewound."""

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event with the time in UTC."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.append({"time": time, "kind": kind, **fields})


def read_jsonl(path: Path) -> list[Row]:
    """The rows of a log. A torn last line is skipped; any other bad line is a ConfigError."""
    return [_parse(line, path, number) for number, line in enumerate(_whole_lines(path), 1)]


def finite_json(value: Any) -> Any:
    """``value`` with every infinity and NaN in it replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(item) for item in value]
    return value


def _line(row: Row) -> bytes:
    # The default escapes every non-ASCII character and newline: a line stays a line for any text.
    return json.dumps(finite_json(row), allow_nan=False).encode("ascii") + b"\n"


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def _parse(line: bytes, path: Path, number: int) -> Row:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number} is not JSON ({error}); mend or delete the line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path}, line {number} is not a JSON object; mend or delete the line")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not strict JSON")


def _step_of(line: bytes, path: Path, number: int) -> int:
    step = _parse(line, path, number).get("step")
    if not isinstance(step, int):
        raise ConfigError(f"{path}, line {number} has no whole number as its step; mend or delete the line")
    return step


def _cut_torn_tail(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
