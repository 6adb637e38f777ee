"""JSON-lines logs (metrics.jsonl, events.jsonl): append-only, readable during the run, intact after a kill.

``JsonlLog`` and ``EventLog`` append rows; ``read_jsonl`` returns them and raises ConfigError for a bad line;
``read_events`` and ``rows_from_end`` skip bad lines. Text after the last newline is the torn end of an
interrupted write: all readers skip it, and the log's owner removes it on opening. Lines are not fsynced.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import append_whole
from bapo_megatron.runtime.storage import writing

Row = dict[str, Any]

_BLOCK = 1 << 16


class JsonlLog:
    """JSON-lines file open for appending by one process. ``append`` writes a row in one call, so that a kill
    tears at most one line; ``rewind`` removes the rows after a resumed run's step. The constructor removes an
    earlier torn end. ``append`` is thread-safe and raises RunStopped if the disk does not accept the line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._one_writer = threading.Lock()
        self._file = FileIO(path, "ab")

    def append(self, row: Row) -> None:
        """Write one line. Infinities and NaN become null: strict JSON has neither. Raises RunStopped if the
        disk does not accept it; earlier lines stay."""
        with writing("a line", self.path), self._one_writer:  # events come from several threads
            append_whole(self._file, [_line(row)], self._file.seek(0, os.SEEK_END))

    def rewind(self, step: int) -> None:
        """Remove the rows after ``step``, which a resumed run writes again. Steps in a log never decrease."""
        # From the end: a long run's log has gigabytes, and all ranks wait for this.
        with self.path.open("r+b") as file:
            kept = size = file.seek(0, os.SEEK_END)
            for begin, line in _lines_from_end(file):
                if parse_row(line)["step"] <= step:
                    break
                kept = begin
            if kept < size:
                file.truncate(kept)

    def close(self) -> None:
        self._file.close()


class EventLog(JsonlLog):
    """Event log, events.jsonl, of the process that owns the run: ``event`` appends a kind, a time and fields.
    Thread-safe; raises RunStopped if the disk does not accept a line. Not rewound on a resume. Other
    processes write to it by ``append_event``."""

    def event(self, kind: str, **fields: Any) -> None:
        self.append(_event(kind, fields))


def append_event(path: Path, kind: str, **fields: Any) -> None:
    """Write one event, whole or not at all, from a process that does not own the log; no repair of a torn
    end. Raises OSError if the disk does not accept it."""
    with FileIO(path, "ab") as file:
        append_whole(file, [_line(_event(kind, fields))], file.seek(0, os.SEEK_END))


def read_jsonl(path: Path) -> list[Row]:
    """Return a log's rows without a torn last line. Raises ConfigError for any other bad line."""
    return [parse_line(line, path, number) for number, line in enumerate(whole_lines(path), 1)]


def read_events(path: Path) -> list[Row]:
    """Return an event log's rows without damaged lines: several nodes write to the log, and on NFS two lines
    may overwrite each other. Empty if the file is missing."""
    return [*rows_from_end(path)][::-1]


def rows_from_end(path: Path) -> Iterator[Row]:
    """Yield a log's rows, newest first, with one block in memory; bad lines and a torn end are dropped.
    Yields nothing if the file is missing."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for _, line in _lines_from_end(file):
            with suppress(ValueError):
                yield parse_row(line)


def finite_json(value: Any) -> Any:
    """Return ``value`` with every infinity and NaN in it replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(item) for item in value]
    return value


def _event(kind: str, fields: Row) -> Row:
    return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **fields}


def _line(row: Row) -> bytes:
    # Default escaping covers all non-ASCII characters and newlines: any text stays one line.
    return json.dumps(finite_json(row), allow_nan=False).encode("ascii") + b"\n"


def parse_row(line: bytes) -> Row:
    """Return a line's row, with replacement characters for invalid UTF-8. Raises ValueError if the line is
    not a JSON object."""
    row: Row = json.loads(line.decode(errors="replace"))
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    return row


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield a log's lines without newlines, one in memory at a time; a torn last one is skipped."""
    with path.open("rb") as file:
        yield from (line[:-1] for line in file if line.endswith(b"\n"))


def parse_line(line: bytes, path: Path, number: int) -> Row:
    """Return the row of line ``number``. Raises ConfigError with file and line if it is not a JSON object."""
    try:
        return parse_row(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number} is not JSON ({error}); mend or delete the line") from error


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line's offset and text without newline, last one first. None is torn."""
    begin, tail = file.seek(0, os.SEEK_END), b""
    while begin:
        size = min(_BLOCK, begin)
        begin -= size
        file.seek(begin)
        tail = file.read(size) + tail
        while (before := tail.rfind(b"\n", 0, -1)) >= 0:
            yield begin + before + 1, tail[before + 1 : -1]
            tail = tail[: before + 1]
    if tail:
        yield 0, tail[:-1]


def _cut_torn_tail(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                begin, _ = next(_lines_from_end(file))
                file.truncate(begin)
