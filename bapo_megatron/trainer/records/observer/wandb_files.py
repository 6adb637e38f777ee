"""Reader of W&B's offline files: the steps that they hold, after a kill fewer than were logged.

For ``WandbTracker`` at a restart. A file has LevelDB's log format (github.com/google/leveldb,
doc/log_format.md) after a header of seven bytes: blocks of 32 KiB with records of checksum (4 bytes), length
(2), kind (1: whole, 2: first, 3: middle, 4: last part) and data, here a Record of W&B's protocol. A torn end
is left out. Used by ``wandb_tracker.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.run_files import read_plain

_HEADER, _BLOCK, _RECORD_HEADER = 7, 1 << 15, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


def steps_with(folder: Path, run_id: str, metric: str) -> Iterator[int]:
    """Steps of the offline run ``run_id`` that have ``metric``, in all files of ``folder``."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        with read_plain(path) as file:
            data = file.read()
        for record in _records(data):
            message: Any = wandb_internal_pb2.Record.FromString(record)  # type: ignore[attr-defined,unused-ignore]
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in message.history.item}
            if metric in items:
                yield int(json.loads(items["_step"]))


def _records(data: bytes) -> Iterator[bytes]:
    """The complete records of a file; a torn end is left out."""
    at, parts = _HEADER, b""
    while at + _RECORD_HEADER <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _RECORD_HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begin = at + _RECORD_HEADER
        at = begin + length
        if not kind or at > len(data):
            return
        parts = (b"" if kind in (_WHOLE, _FIRST) else parts) + data[begin:at]
        if kind in (_WHOLE, _LAST):
            yield parts
