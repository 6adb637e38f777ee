"""Checkpoints that are written at once, for tests of other things."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.interfaces import Saving


class Written:
    """A ``Saving`` that is done as soon as it has begun."""

    def is_written(self) -> bool:
        return True

    def finish(self) -> None: ...


def write_policy(content: bytes) -> Callable[[Path], Saving]:
    """Stands for a policy's ``save``."""

    def write(path: Path) -> Saving:
        (path / "deep").mkdir(parents=True)
        (path / "deep/weights.bin").write_bytes(content)
        return Written()

    return write


def save(
    store: CheckpointStore, step: int, policy: Callable[[Path], Saving], trainer: dict[str, Any]
) -> None:
    """Begin and end."""
    store.begin((step, 0), {"policy": policy}, trainer)
    assert store.finalize(wait=True) is not None


def complete(saving: Saving) -> None:
    """Wait for a policy's part of a checkpoint. Collective."""
    while not saving.is_written():
        time.sleep(0.01)
    dist.barrier()
    saving.finish()
