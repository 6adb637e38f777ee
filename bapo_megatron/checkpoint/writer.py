"""A checkpoint on its way to the disk: its parts are written, digests are taken, then it gets its name."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bapo_megatron.interfaces import Saving
from bapo_megatron.runtime.files import sync_file, sync_folder, write_atomically

MANIFEST = "manifest.json"

_RANK_0_FIRST_S = 120.0
"""torch tells what went wrong to rank 0 alone. The other ranks give it time to say so and to end the run: who
fails first decides the exit code."""

Digests = dict[str, dict[str, Any]]
"""Size and SHA-256 by file name."""


class PendingCheckpoint:
    """One checkpoint, while the training goes on. All ranks call the same methods in the same order."""

    def __init__(self, saving: Saving, temporary: Path, final: Path, about: dict[str, Any]) -> None:
        """``about``: what the manifest says besides the files."""
        self._saving, self._temporary, self.final = saving, temporary, final
        self._about = about
        self._began = perf_counter()
        self.seconds = 0.0
        """Until it was on disk with its digests, on the slowest rank."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._digests: Future[tuple[Digests, float]] | None = None

    def advance(self) -> bool:
        """Go on as far as all ranks can without waiting; whether the checkpoint is whole. Collective."""
        if self._digests is None:
            if not _everywhere(self._saving.is_written()):
                return False
            self._finish_parts()
            dist.barrier()  # rank 0 has written its part of the whole
            files = sorted(path for path in self._temporary.rglob("*") if path.is_file())
            mine = files[dist.get_rank() :: dist.get_world_size()]
            self._digests = self._thread.submit(self._digested, mine)
        if not _everywhere(self._digests.done()):
            return False
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self._digests.result())
        self._thread.shutdown()
        self.seconds = max(seconds for _, seconds in parts)
        found = {name: value for digests, _ in parts for name, value in sorted(digests.items())}
        on_main(lambda: self._publish({**self._about, "files": found}))
        return True

    def _finish_parts(self) -> None:
        try:
            self._saving.finish()
        except CheckpointException as error:
            if not error.failures:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which rank 0's end reaches this one
                sleep(_RANK_0_FIRST_S)
            raise

    def _digested(self, files: list[Path]) -> tuple[Digests, float]:
        """Those of ``files``, each synced to disk, and when that was done."""
        found = {}
        for path in files:
            sync_file(path)
            found[str(path.relative_to(self._temporary))] = digest(path)
        return found, perf_counter() - self._began

    def _publish(self, manifest: dict[str, Any]) -> None:
        write_atomically(self._temporary / MANIFEST, json.dumps(manifest, indent=2))
        for folder in [self._temporary, *(path for path in self._temporary.rglob("*") if path.is_dir())]:
            sync_folder(folder)
        if self.final.exists():  # broken, or the run was continued from an older one
            remove(self.final)
        self._temporary.rename(self.final)
        sync_folder(self.final.parent)


def on_main(action: Callable[[], None]) -> None:
    """Do it on rank 0 while the others wait; an error there ends them all."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def remove(path: Path) -> None:
    """Delete a checkpoint; its name goes first, so that no half of it is ever met under it."""
    hidden = path.with_name(f".{path.name}.deleted")
    path.rename(hidden)
    shutil.rmtree(hidden)


def digest(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _everywhere(here: bool) -> bool:
    """Whether it is so on every rank."""
    told = torch.tensor([here], dtype=torch.int32)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told.item())
