"""Weights & Biases tracker: one W&B run for all starts of a run directory.

At a restart the steps are read that W&B's offline files hold, after a kill fewer than were logged. A file has
LevelDB's log format (github.com/google/leveldb, doc/log_format.md) after a header of seven bytes: blocks of
32 KiB with records of checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last part) and
data, here a Record of W&B's protocol. A torn end is left out. In the observer's process. Used by
``__main__.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.run_files import read_plain
from bapo_megatron.trainer.records.observer.state import NOTHING
from bapo_megatron.trainer.records.observer.tracker import TrackedRun

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


class WandbTracker:
    """The ``Tracker`` of W&B. WANDB_MODE=offline keeps the run in RUN/trackers/wandb, or in WANDB_DIR/wandb.

    ``write`` returns before W&B has stored the row; at a restart ``last_step`` tells what it has.
    ``Observer`` makes and calls it.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        self._files = folder / "wandb"
        self._id = run.id
        self._run: Any = wandb.init(
            project=run.project,
            id=run.id,
            resume="allow",
            name=run.name,
            config=run.config,
            dir=str(folder),
            settings=wandb.Settings(console="off"),
        )

    def last_step(self, metric: str) -> int:
        # W&B writes some time after `log`: after a kill its server, or its files, have fewer steps.
        if self._run.offline:
            return max(steps_with(self._files, self._id, metric), default=NOTHING)
        return int(self._run.starting_step) - 1

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()
