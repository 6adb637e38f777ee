"""A run's journal: kill-safe write-ahead logs, append-only files of checksummed records.

    RUN/journal/segments-000001.log  segments-000002.log ...   (and step_000001.npz ..., see step_batches.py)

``SegmentJournal`` replays, commits and deletes; ``read_records`` yields the records of one file. A record is
a header (magic, kind, sizes, header CRC), a JSON object, numpy arrays end to end, and a CRC over both. The
magic tells whether more records of the same commit follow; an incomplete commit at the end of a file does not
count. Reading reports a damaged record with its offset and continues at the next whole record. A start begins
a new log. Every log begins with a snapshot of the sampler's state without its groups, so that older logs can
be deleted once their groups are trained on or dropped.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import append_whole, open_lock, sync_folder
from bapo_megatron.runtime.storage import OldFiles, writing

_MAGIC = b"BPR"
_LAST, _MORE = _MAGIC + b"1", _MAGIC + b"+"  # magic of a commit's last record; of its other records
_HEAD = struct.Struct("<4s16sII")  # magic, kind, bytes of JSON, bytes of arrays
_CHECK = struct.Struct("<I")
_OVERHEAD = _HEAD.size + 2 * _CHECK.size

FILE_BYTES = 256 * 2**20  # log size from which ``is_full`` is true
_LOCK_WAIT_S = 30.0  # maximum wait for the lock: a killed process may take this long to end


@dataclass(frozen=True)
class Record:
    """Record of the write-ahead log, a sampler event or snapshot: kind, JSON fields, numpy arrays."""

    kind: str
    """Event kind, 1 to 16 ASCII characters."""
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]
    offset: int = -1
    """Offset in its file if read from one, otherwise -1."""


@dataclass(frozen=True)
class Damage:
    """A damaged range of a log, yielded by ``read_records``: offset and size in bytes, and the reason."""

    offset: int
    size: int
    reason: str


class WriteAheadLog:
    """A new log file, written by one process: ``write`` commits records, or raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file = FileIO(path, "ab")

    def write(self, records: Iterable[Record]) -> None:
        """Commit ``records`` atomically, even if killed: all are durable on return, none on an OSError."""
        *others, last = records
        parts = [part for record in others for part in encode(record, _MORE)] + encode(last)
        # In parts: with routes a commit has hundreds of megabytes, and a copy costs as much as the CRC.
        appended = append_whole(self._file, parts, self.size)
        try:
            os.fsync(self._file.fileno())
        except OSError:
            # Full disk: drop the tail so that no later commit follows what may be half of this one.
            self._file.truncate(self.size)
            raise
        self.size += appended

    def close(self) -> None:
        self._file.close()


def encode(record: Record, magic: bytes = _LAST) -> list[bytes | memoryview]:
    """Return the bytes of a record in parts, without copying contiguous arrays."""
    kind = record.kind.encode("ascii")
    layout = [(name, array.dtype.str, array.shape) for name, array in record.arrays.items()]
    text = json.dumps({"fields": record.fields, "arrays": layout}).encode()
    data = [np.ascontiguousarray(array).data for array in record.arrays.values() if array.size]
    head = _HEAD.pack(magic, kind, len(text), sum(part.nbytes for part in data))
    check = zlib.crc32(text)
    for part in data:
        check = zlib.crc32(part, check)
    return [head + _CHECK.pack(zlib.crc32(head)) + text, *data, _CHECK.pack(check)]


def read_records(path: Path) -> Iterator[Record | Damage]:
    """Yield a log's records in order, and the damaged ranges between them."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = 0
        commit: list[Record] = []  # records of a commit whose last record has not been read
        while at < len(content):
            record, end = _record_at(content, at)
            if record is not None:
                commit.append(record)
                if content[at : at + len(_LAST)] == _LAST:
                    yield from commit
                    commit.clear()
                at = end
                continue
            start, at = at, _next_record(content, at + 1)
            if at < len(content):
                yield from commit
                commit.clear()
                yield Damage(start, at - start, "damaged")
            elif not commit:
                yield Damage(start, at - start, "torn at the end")
        if commit:
            yield Damage(commit[0].offset, at - commit[0].offset, "torn at the end")


def _next_record(content: mmap.mmap, start: int) -> int:
    at = content.find(_MAGIC, start)
    while at >= 0:
        if _record_at(content, at)[0] is not None:
            return at
        at = content.find(_MAGIC, at + 1)
    return len(content)


def _record_at(content: mmap.mmap, at: int) -> tuple[Record | None, int]:
    """Return the record at offset ``at`` (None if it is not whole) and its end."""
    if len(content) - at < _OVERHEAD or content[at : at + len(_LAST)] not in (_LAST, _MORE):
        return None, at
    head = content[at : at + _HEAD.size]
    body = at + _HEAD.size + _CHECK.size
    if _CHECK.unpack_from(content, at + _HEAD.size)[0] != zlib.crc32(head):
        return None, at
    _, kind, text_size, data_size = _HEAD.unpack(head)
    end = body + text_size + data_size + _CHECK.size
    if end > len(content) or _CHECK.unpack_from(content, end - _CHECK.size)[0] != zlib.crc32(
        content[body : end - _CHECK.size]
    ):
        return None, at
    return _decoded(kind, content[body : body + text_size], content[body + text_size : end - 4], at), end


def _decoded(kind: bytes, text: bytes, data: bytes, offset: int) -> Record:
    described: Mapping[str, Any] = json.loads(text)
    arrays, used = {}, 0
    for name, dtype, shape in described["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, dtype, count, used).reshape(shape).copy()
        used += arrays[name].nbytes
    return Record(kind.rstrip(b"\0").decode(), described["fields"], arrays, offset)


class SegmentJournal:
    """The write-ahead logs in ``folder``, which it locks. Call ``replay``, and ``rotate`` to start a new log;
    then ``commit`` any number of times. Call ``rotate`` again before a ``commit`` if the log ``is_full``, and
    before ``delete_old``, which deletes earlier logs. Calls block until the data is on disk, and raise
    RunStopped if the disk fails."""

    def __init__(self, folder: Path, old: OldFiles | None = None) -> None:
        """Lock ``folder``; raises ConfigError if another process writes there. ``old``: deletes old logs."""
        self._folder, self._old = folder, old or OldFiles()
        with writing("the journal", folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder / ".lock")
        self._groups: dict[Path, set[int]] = {}  # numbers of groups with records in each log
        self._log: WriteAheadLog | None = None

    def replay(self, apply: Callable[[Record], None]) -> list[str]:
        """Call ``apply`` with every record in order; return descriptions of damage."""
        damage: list[str] = []
        for path in self._paths():
            groups = self._groups[path] = set()
            for record in read_records(path):
                if isinstance(record, Damage):
                    damage.append(
                        f"{path}: {record.size} bytes at offset {record.offset} are {record.reason}"
                    )
                else:
                    groups.update(_group_numbers(record))
                    apply(record)
        return damage

    def rotate(self, snapshot: Record, *more: Record) -> None:
        """Close the current log and start a new one with ``snapshot``. ``more``: records committed
        atomically with it."""
        if self._log is not None:
            self._log.close()
        number = max((int(path.stem.removeprefix("segments-")) for path in self._paths()), default=0) + 1
        path = self._folder / f"segments-{number:06d}.log"
        with writing("the journal", path):
            self._log, self._groups[path] = WriteAheadLog(path), set()
        self.commit([snapshot, *more])
        # The new file's name must also be durable before `delete_old` removes earlier logs.
        sync_folder(self._folder)

    @property
    def is_full(self) -> bool:
        return self._log is not None and self._log.size >= FILE_BYTES

    def commit(self, records: Sequence[Record]) -> None:
        """Write all ``records`` durably, or none if it raises RunStopped."""
        assert self._log is not None
        with writing("the journal", self._log.path):
            self._log.write(records)
        for record in records:
            self._groups[self._log.path].update(_group_numbers(record))

    def delete_old(self, outstanding: Iterable[int]) -> None:
        """Delete the oldest logs, until one has ``outstanding`` groups, cannot be deleted or is current."""
        needed = set(outstanding)
        for path in self._paths()[:-1]:
            if self._groups.get(path, needed) & needed:
                return
            with self._old.deleting(path):
                path.unlink()
            if path.exists():
                return
            self._groups.pop(path, None)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._lock.close()

    def _paths(self) -> list[Path]:
        # `glob` would find no logs in an unlistable folder, and the journal would start over.
        names = os.listdir(self._folder)
        return sorted(self._folder / n for n in names if n.startswith("segments-") and n.endswith(".log"))


def _group_numbers(record: Record) -> Iterable[int]:
    fields = record.fields
    if record.kind in ("segments", "given"):
        return {part[0] for part in fields["parts"]}
    if record.kind == "open":
        return {group[0] for group in fields["groups"]}
    return {fields["number"]} if "number" in fields else ()


def _locked(path: Path) -> BinaryIO:
    file = open_lock(path)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise ConfigError(f"another process writes to the journal {path.parent}; end it") from None
            time.sleep(0.1)
