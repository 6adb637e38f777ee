"""Per-token columns of a step on a trainer rank, read from the step file one response at a time.

    rank 0       header_of       numbers and checksums of all responses; broadcast, about 50 bytes a response
    every rank   StepColumns     prompt and columns of one response, at each ``read``

A batch has gigabytes, a header kilobytes, and a rank trains only on its own samples, so the columns travel
through the run directory, which all nodes share. To verify that it reads the same file as rank 0, a rank
compares size and tail (where the zip format stores the CRC-32 of every array), then each response's checksum.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
import zlib
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile

import numpy as np

from bapo_megatron.errors import ConfigError, StorageFailed
from bapo_megatron.runtime.storage import FailingDiskError
from bapo_megatron.types import (
    RESPONSE_COLUMNS,
    ColumnFile,
    Group,
    GroupHeader,
    ResponseHeader,
    ResponseTokens,
    Rollout,
    StepBatch,
    StepHeader,
    VersionSpan,
)

PROMPTS = "prompt_ids"
"""Name of the array of all prompts' token ids, end to end."""
VISIBLE_S = 90.0
"""Maximum wait for a step file, in seconds; an NFS client may hide a new file for a minute (acdirmax)."""
_POLL_S = 0.1
_TAIL_BYTES = 4096  # more than a step file's zip directory; the file may be shorter


def header_of(batch: StepBatch, file: ColumnFile) -> StepHeader:
    """Return the header of ``batch``, whose columns are in ``file``; called on rank 0."""
    return StepHeader(tuple(map(_group_header, batch.groups)), batch.metrics, file)


def _group_header(group: Group) -> GroupHeader:
    ids_P = group.prompt.token_ids_P
    responses = tuple(
        _response_header(rollout, ids_P if rollout.has_prompt else ids_P[:0]) for rollout in group.rollouts
    )
    header = GroupHeader(group.prompt.source, len(ids_P), responses)
    cut = (any(response.is_cut for response in rows) for rows in header.episodes for _ in rows)
    return header._replace(responses=tuple(response._replace(is_cut=next(cut)) for response in responses))


def _response_header(rollout: Rollout, ids_P: np.ndarray) -> ResponseHeader:
    mask_R = rollout.loss_mask_R
    if mask_R is None:
        mask_R = np.ones(len(rollout.token_ids_R), np.bool_)
    trained = int(np.count_nonzero(mask_R))
    predicted = trained - int(not len(ids_P) and mask_R[:1].any())
    teacher_R = rollout.teacher_log_probs_R
    return ResponseHeader(
        reward=rollout.reward,
        trained_tokens=trained,
        predicted_tokens=predicted,
        tokens=len(rollout.token_ids_R),
        versions=VersionSpan.of(rollout.versions_R[mask_R]),
        checksum=checksum(ids_P, rollout),
        has_teacher_log_probs=teacher_R is not None and bool(np.isfinite(teacher_R).all()),
        routes=rollout.stored_routes,
        is_cut=rollout.finish_reason == "length",
        named_rewards=rollout.named_rewards,
        branch=rollout.branch,
        has_prompt=rollout.has_prompt,
    )


def checksum(ids_P: np.ndarray, tokens: ResponseTokens) -> int:
    """Return the CRC-32 of a prompt's ids and all columns of a response, in file order."""
    total = zlib.crc32(ids_P.data)
    for array in tokens.arrays.values():
        total = zlib.crc32(array.data, total)
    return total


def column_file(path: Path, file: BinaryIO, archive: ZipFile) -> ColumnFile:
    """Return the layout of a step file's arrays. ``archive``: of the open ``file``, whose position changes.
    Raises ConfigError for a compressed file (``numpy.savez_compressed``), which has no random access."""
    columns = {}
    for member in archive.infolist():
        if member.compress_type != ZIP_STORED:
            raise ConfigError(f"{path}: its {member.filename} is compressed; write it with numpy.savez")
        # Name length and extra-field length end the 30-byte local header.
        file.seek(member.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))
        file.seek(name + extra, os.SEEK_CUR)
        np.lib.format.read_magic(file)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        columns[member.filename.removesuffix(".npy")] = (file.tell(), dtype.str)
    size = file.seek(0, os.SEEK_END)
    return ColumnFile(path, size, _tail(file, size), columns)


def _tail(file: BinaryIO | FileIO, size: int) -> str:
    file.seek(max(0, size - _TAIL_BYTES))
    return hashlib.sha256(file.read(_TAIL_BYTES)).hexdigest()


class StepColumns:
    """Columns of a step's responses on a trainer rank: ``open``, ``read``, ``close``.

    Reads by offset, not through a memory map, because truncation or server loss of a mapped file kills the
    process with SIGBUS. ``read`` raises FailingDiskError, on this rank only, if it cannot.
    """

    def __init__(self, header: StepHeader, limit_s: float = VISIBLE_S) -> None:
        """``limit_s``: maximum seconds that ``open`` waits for the file."""
        self._header, self._limit_s = header, limit_s
        self._prompts = [0, *accumulate(group.prompt_tokens for group in header.groups)]
        """Offset of each group's prompt among all prompt ids."""
        tokens = (response.tokens for group in header.groups for response in group.responses)
        self._responses = [0, *accumulate(tokens)]  # offset of each response among all response tokens
        self._first = [0, *accumulate(len(group.responses) for group in header.groups)]
        """Index of each group's first response in the step."""
        self._opened: FileIO | None = None

    @property
    def header(self) -> StepHeader:
        """The step header, equal on every rank."""
        return self._header

    def open(self) -> None:
        """Open the file that rank 0 read, waiting for a file system that shows it late. Raises StorageFailed,
        with path and host, if the file is missing or different after the wait."""
        deadline = time.monotonic() + self._limit_s
        while problem := self._open_problem():
            if time.monotonic() >= deadline:
                raise StorageFailed(
                    f"{self._place}: {problem}. Rank 0 has read {self._header.file.size:,} bytes there, and "
                    f"this rank has waited {self._limit_s:g} s for them: all nodes of a run must see its "
                    "directory, and that of rollout.replay, by the same path on one shared file system"
                )
            time.sleep(_POLL_S)

    def read(self, group: int, response: int) -> tuple[np.ndarray, ResponseTokens]:
        """Return the token ids of a group's prompt (empty for a branch with its own prompt) and the tokens of
        one response. Raises FailingDiskError if the bytes cannot be read or differ from rank 0's."""
        about, number = self._header.groups[group], self._first[group] + response
        expected = about.responses[response]
        prompt_tokens = about.prompt_tokens if expected.has_prompt else 0
        ids_P = self._values(PROMPTS, self._prompts[group], prompt_tokens)
        start, count = self._responses[number], expected.tokens
        columns: dict[str, Any] = {
            name: None
            if column.fill is not None and column.array not in self._header.file.columns
            else self._values(column.array, start, count)
            for name, column in RESPONSE_COLUMNS.items()
        }
        tokens = ResponseTokens(**columns)
        if checksum(ids_P, tokens) != expected.checksum:
            raise FailingDiskError(
                f"{self._place}: response {response} of group {group} has other bytes than rank 0 has read"
            )
        return ids_P, tokens

    def close(self) -> None:
        if self._opened:
            self._opened.close()

    @property
    def _place(self) -> str:
        return f"{self._header.file.path.absolute()} on {socket.gethostname()}"

    def _open_problem(self) -> str | None:
        known = self._header.file
        try:
            # Opening the folder makes an NFS client revalidate its directory cache.
            os.close(os.open(known.path.parent, os.O_RDONLY | os.O_DIRECTORY))
            file = known.path.open("rb", buffering=0)
            size = os.fstat(file.fileno()).st_size
            if (size, _tail(file, size)) == (known.size, known.tail):
                self._opened = file
                return None
            file.close()
        except OSError as error:  # not there yet, or a stale handle, which may recover
            return f"the file cannot be read: {error.strerror}"
        return f"the file of {size:,} bytes is another than rank 0 has read"

    def _values(self, array: str, start: int, count: int) -> np.ndarray:
        assert self._opened is not None, "open() comes first"
        offset, dtype = self._header.file.columns[array]
        values = np.empty(count, dtype)
        rest, at = values.view(np.uint8).data, offset + start * values.itemsize
        try:
            while rest:
                if not (done := os.preadv(self._opened.fileno(), [rest], at)):
                    raise FailingDiskError(f"{self._place}: the file ends within {array}; it was cut short")
                rest, at = rest[done:], at + done
        except OSError as error:
            raise FailingDiskError(f"{self._place}: {array} cannot be read: {error.strerror}") from error
        return values
