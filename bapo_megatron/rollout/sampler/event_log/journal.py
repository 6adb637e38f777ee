"""The journal of a run: a folder of write-ahead logs, with rotation, replay, and deletion of old logs.

    RUN/journal/segments-000001.log  segments-000002.log ...   (and step_000001.npz ..., see step_batches.py)

Every log begins with a snapshot of the sampler's state, so that older logs can be deleted. One process
writes; a file lock excludes others. Used by ``rollout/sampler/group_sampler.py`` and
``rollout/sampler/loop.py``.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.sampler.event_log.write_ahead_log import (
    Damage,
    Record,
    WriteAheadLog,
    read_records,
)
from bapo_megatron.runtime.files import sync_folder
from bapo_megatron.runtime.run_files import open_lock
from bapo_megatron.runtime.storage import writing

FILE_BYTES = 256 * 2**20
"""Rotation size: a new log begins when the current one has reached it."""

_LOCK_WAIT_S = 30.0
"""Longest wait for the lock, in seconds: a killed process may take so long to end."""


class SegmentJournal:
    """The write-ahead logs in ``folder``, with a lock on it. ConfigError if another process writes there.

    In order: ``replay``, then ``rotate``, then any number of ``commit``s. Calls block until the disk has the
    data; RunStopped if it fails. Made by ``GroupSampler``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with writing("the journal", folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder / ".lock")
        self._groups: dict[Path, set[int]] = {}
        """Numbers of the groups with records in each log."""
        self._log: WriteAheadLog | None = None

    def replay(self, apply: Callable[[Record], None]) -> list[str]:
        """Replay: call ``apply`` with every record in order; returns descriptions of the damage."""
        damage: list[str] = []
        for path in self._paths():
            groups = self._groups[path] = set()
            for found in read_records(path):
                if isinstance(found, Damage):
                    damage.append(f"{path}: {found.size} bytes at offset {found.offset} are {found.reason}")
                else:
                    groups.update(_group_numbers(found))
                    apply(found)
        return damage

    def rotate(self, snapshot: Record, *more: Record) -> None:
        """Start a new log: once after ``replay``, and whenever the current one ``is_full``.

        ``more``: records that are committed together with the snapshot, all or none.
        """
        if self._log is not None:
            self._log.close()
        number = max((int(path.stem.removeprefix("segments-")) for path in self._paths()), default=0) + 1
        path = self._folder / f"segments-{number:06d}.log"
        with writing("the journal", path):
            self._log, self._groups[path] = WriteAheadLog(path), set()
        self.commit([snapshot, *more])
        # The file's name must be durable, too, before `delete_old` may remove the logs before it.
        sync_folder(self._folder)

    @property
    def is_full(self) -> bool:
        """Whether the current log has reached the rotation size."""
        return self._log is not None and self._log.size >= FILE_BYTES

    def commit(self, records: Sequence[Record]) -> None:
        """Write ``records`` durably, all of them, or none if it raises RunStopped."""
        assert self._log is not None
        with writing("the journal", self._log.path):
            self._log.write(records)
        for record in records:
            self._groups[self._log.path].update(_group_numbers(record))

    def delete_old(self, outstanding: Iterable[int]) -> None:
        """Delete the oldest logs, up to the first with records of one of the ``outstanding`` groups."""
        needed = set(outstanding)
        for path in self._paths()[:-1]:
            if self._groups.get(path, needed) & needed:
                return
            path.unlink()
            self._groups.pop(path, None)

    def close(self) -> None:
        """Release the files and the lock."""
        if self._log is not None:
            self._log.close()
        self._lock.close()

    def _paths(self) -> list[Path]:
        # Not by glob, which finds no log where the folder cannot be listed: the journal would begin anew.
        names = os.listdir(self._folder)
        return sorted(self._folder / n for n in names if n.startswith("segments-") and n.endswith(".log"))


def _group_numbers(record: Record) -> Iterable[int]:
    """The numbers of the groups that a record is about; none for a step's batch."""
    fields = record.fields
    if record.kind in ("segments", "given"):
        return {part[0] for part in fields["parts"]}
    if record.kind == "open":
        return {group[0] for group in fields["groups"]}
    return {fields["number"]} if "number" in fields else ()


def _locked(path: Path) -> BinaryIO:
    """Lock the file exclusively; closing it releases the lock. ConfigError if another process holds it."""
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
