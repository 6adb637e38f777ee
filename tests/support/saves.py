"""Checkpoints that are written at once, for tests of other things, and counts of what is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.interfaces import Saving
from bapo_megatron.policy.stored_checkpoint import StoredReader


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
    store.begin((step, 0), policy, trainer)
    assert store.finalize(wait=True) is not None


def complete(saving: Saving) -> None:
    """Wait for a policy's part of a checkpoint. Collective."""
    while not saving.is_written():
        time.sleep(0.01)
    dist.barrier()
    saving.finish()


@contextmanager
def counting_reads() -> Iterator[list[int]]:
    """The sizes in the files of all tensors that this rank reads of a checkpoint."""
    real, sizes = StoredReader.read_data, []

    def counted(reader: StoredReader, plan: Any, planner: Any) -> Any:
        for index in (item.storage_index for item in plan.items):
            sizes.append(reader._chunks[index.fqn, tuple(index.offset or ())].place.length)
        return real(reader, plan, planner)

    StoredReader.read_data = counted
    try:
        yield sizes
    finally:
        StoredReader.read_data = real


class CountingReader(HfReader):
    """A reader of a model folder that counts the bytes of what it gives."""

    count = 0

    def read(self, name: str, *part: slice) -> torch.Tensor:
        tensor = super().read(name, *part)
        self.count += tensor.nbytes
        return tensor
