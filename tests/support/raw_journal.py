"""A run's journal as bytes: a reading of its own, so that no bug of the package's can hide itself."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from tests.support.at_start import sitecustomize

MAGIC_OF_LAST, MAGIC_OF_OTHERS = b"BPR1", b"BPR+"
"""What begins the last record of a commit, and those before it."""

HEAD_BYTES = 4 + 16 + 4 + 4


class RawRecord(NamedTuple):
    """One record of a log."""

    kind: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]
    is_last: bool
    """Of the records that were written together."""


class RawResponse(NamedTuple):
    """One response of a step's file."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    is_sampled: np.ndarray
    """The loss mask: all True where the file has none."""
    finish_reason: str
    reward: float


class RawGroup(NamedTuple):
    """One group of a step's file."""

    number: int
    prompt_id: int
    prompt_ids: np.ndarray
    responses: list[RawResponse]


def read_log(path: Path) -> list[RawRecord]:
    """All records of commits that are whole. AssertionError if anything but the end is damaged."""
    content, at = path.read_bytes(), 0
    found: list[RawRecord] = []
    while (one := _record_at(content, at)) is not None:
        record, at = one
        found.append(record)
    torn = content[at:]
    later = [n for n in range(1, len(torn)) if torn[n : n + 3] == MAGIC_OF_LAST[:3]]
    assert all(_record_at(torn, n) is None for n in later), f"{path}: damaged at offset {at}"
    while found and not found[-1].is_last:
        found.pop()
    return found


def _record_at(content: bytes, at: int) -> tuple[RawRecord, int] | None:
    head = content[at : at + HEAD_BYTES]
    if len(head) < HEAD_BYTES or head[:4] not in (MAGIC_OF_LAST, MAGIC_OF_OTHERS):
        return None
    text_size, data_size = struct.unpack("<II", head[20:])
    body = at + HEAD_BYTES + 4
    end = body + text_size + data_size
    checks = content[at + HEAD_BYTES : body] + content[end : end + 4]
    if checks != struct.pack("<II", zlib.crc32(head), zlib.crc32(content[body:end])):
        return None
    described = json.loads(content[body : body + text_size])
    arrays, data = {}, body + text_size
    for name, dtype, (length,) in described["arrays"]:
        arrays[name] = np.frombuffer(content, dtype, length, data)
        data += arrays[name].nbytes
    assert data == end
    kind = head[4:20].rstrip(b"\0").decode()
    return RawRecord(kind, described["fields"], arrays, head[:4] == MAGIC_OF_LAST), end + 4


def read_step_file(path: Path) -> tuple[list[RawGroup], dict[str, Any]]:
    """The groups of a step, and its metrics."""
    with np.load(path) as arrays:
        header = json.loads(arrays["header"].tobytes())
        columns = [arrays[name] for name in ("token_ids", "log_probs", "versions")]
        masks = arrays["loss_masks"] if "loss_masks" in arrays else np.ones(len(columns[0]), np.bool_)
        columns.append(masks)
        prompt_ids = arrays["prompt_ids"]
    groups, at, prompt_at = [], 0, 0
    for number, group in zip(header["numbers"], header["groups"], strict=True):
        prompt_end = prompt_at + group["prompt"]["token_ids_P"]
        responses = []
        for length, reason, reward, *_ in group["rollouts"]:
            responses.append(RawResponse(*(one[at : at + length] for one in columns), reason, reward))
            at += length
        of_prompt = prompt_ids[prompt_at:prompt_end]
        groups.append(RawGroup(number, group["prompt"]["prompt_id"], of_prompt, responses))
        prompt_at = prompt_end
    assert all(len(one) == at for one in columns)
    assert prompt_at == len(prompt_ids)
    return groups, header["metrics"]


def keep_logs(journal: Path, kept: Path) -> None:
    """Give every log a second name in ``kept``, so that it can be read when the run has deleted it."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in journal.glob("segments-*.log"):
        with suppress(FileExistsError):
            os.link(path, kept / path.name)


@contextmanager
def keeping_logs(journal: Path, kept: Path) -> Iterator[None]:
    """All logs of the journal, also those that the run deletes, are in ``kept`` when it is over.

    Processes that start meanwhile link a log into ``kept`` before they delete it.
    """
    kept.mkdir(parents=True, exist_ok=True)
    paths = filter(None, (str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH")))
    hook = {sitecustomize.VARIABLE: str(kept), "PYTHONPATH": os.pathsep.join(paths)}
    try:
        with patch.dict(os.environ, hook):
            yield
    finally:
        keep_logs(journal, kept)
