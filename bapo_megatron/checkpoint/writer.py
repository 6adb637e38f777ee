"""Asynchronous checkpoint writer: the ranks' parts, then file digests, then the manifest and the rename.

For ``store.py``. A save advances by collective calls, which are polled: parts and digests are
written in the background, manifest and rename by rank 0 while the others wait.
Used in ``trainer/`` and this folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bapo_megatron.interfaces import Saving
from bapo_megatron.runtime.distributed import all_gather, broadcast_from_main
from bapo_megatron.runtime.files import remove_folder, sha256_of, sync_file, sync_folder, write_atomically
from bapo_megatron.runtime.run_paths import MANIFEST, RunPaths, step_leftovers
from bapo_megatron.runtime.storage import check_not_failing, check_readable

_RANK_0_FIRST_S = 120.0
"""Seconds that other ranks wait for rank 0 to end the run after a failed save: torch gives the reason to
rank 0 alone, and the process that fails first decides the exit code."""

Digests = dict[str, dict[str, Any]]
"""Size and SHA-256 by file name."""


class PendingCheckpoint:
    """Asynchronous save of one checkpoint, made when it begins; all ranks make the same calls in one order.

    ``advance`` is polled until it returns True: then the checkpoint is on disk under its name. Errors of a
    write are raised by ``advance``, on rank 0 first. A process that ends before leaves a hidden folder
    behind. Made by ``CheckpointStore.begin``.
    """

    def __init__(
        self, savings: Sequence[Saving], temporary: Path, final: Path, about: dict[str, Any]
    ) -> None:
        """``savings``: the background write of each folder, in ``temporary``, which is renamed to ``final``.
        ``about``: fields of the manifest besides the files."""
        self._savings, self._temporary, self.final = savings, temporary, final
        self._about = about
        self._began = perf_counter()
        self.seconds = 0.0
        """Time from the start of the save until it was on disk with its digests, on the slowest rank."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._digests: Future[tuple[Digests, float]] | None = None

    def advance(self) -> bool:
        """Advance the save as far as all ranks can without waiting; True once it is complete. Collective."""
        if self._digests is None:
            if not _on_every_rank(all(saving.is_written() for saving in self._savings)):
                return False
            self._finish_parts()
            dist.barrier()  # rank 0 has written the metadata: now all files are there
            mine = _files_of_all_ranks(self._temporary)[dist.get_rank() :: dist.get_world_size()]
            self._digests = self._thread.submit(self._sync_and_digest, mine)
        if not _on_every_rank(self._digests.done()):
            return False
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self._digests.result())
        self._thread.shutdown()
        self.seconds = max(seconds for _, seconds in parts)
        found = {name: value for digests, _ in parts for name, value in sorted(digests.items())}
        on_main(lambda: self._publish({**self._about, "files": found}))
        return True

    def _finish_parts(self) -> None:
        """Finish the write of each folder. An error is raised on rank 0 first (see ``_RANK_0_FIRST_S``)."""
        try:
            for saving in self._savings:
                saving.finish()
        except CheckpointException as error:
            if not error.failures:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # sent once rank 0 has failed
                sleep(_RANK_0_FIRST_S)
            raise

    def _sync_and_digest(self, files: list[Path]) -> tuple[Digests, float]:
        """The digests of ``files``, each synced to disk, and the seconds since the checkpoint was begun."""
        found = {}
        for path in files:
            sync_file(path)
            found[str(path.relative_to(self._temporary))] = digest(path)
        return found, perf_counter() - self._began

    def _publish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, then rename the folder to its final name, durably."""
        # The manifest last, and every folder synced before the rename: after a power failure the final name
        # has all files or does not exist.
        write_atomically(self._temporary / MANIFEST, json.dumps(manifest, indent=2))
        for folder in [self._temporary, *(path for path in self._temporary.rglob("*") if path.is_dir())]:
            sync_folder(folder)
        if os.path.lexists(self.final):  # a damaged one, or the run was resumed from an older one
            remove(self.final)
        self._temporary.rename(self.final)
        sync_folder(self.final.parent)


def _files_of_all_ranks(folder: Path) -> list[Path]:
    """Every file below ``folder``, in one order on every rank. Collective.

    A node of NFS may list a folder as it was up to a minute ago, without files that other nodes have written
    since; it knows those of its own ranks. So no single list will do, nor one for each rank: a file on none
    of them would be in no manifest, unchecked at a resume and left out of a fork.
    """
    own = set(_files_below(folder))
    known: set[str] = broadcast_from_main(own)
    return [folder / name for name in sorted(known.union(*all_gather(own - known)))]


def _files_below(folder: Path) -> Iterator[str]:
    for place, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            # NFS keeps a deleted file under such a name while a process has it open, and no longer: in a
            # manifest it would be a missing file at the next start.
            if not name.startswith(".nfs"):
                yield str((Path(place) / name).relative_to(folder))


def _raise(error: OSError) -> None:
    raise error


def on_main(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0; the other ranks wait at a barrier. Collective.

    An error on rank 0 ends its process, and the launcher then ends the others.
    """
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def clear_leftovers(run_dir: Path) -> None:
    """Delete the leftovers of a killed process or a full disk: half-written and half-deleted checkpoints."""
    folder = RunPaths(run_dir).checkpoints
    try:
        leftovers = list(step_leftovers(folder))
    except OSError as error:
        check_readable(error, "the list of checkpoints", folder)
        raise
    for leftover in leftovers:
        delete_hidden(leftover)


def remove(path: Path) -> None:
    """Delete a checkpoint; of a link the link alone. A plain file keeps its hidden name."""
    # A name of its own: what could not be deleted before may still have the plain one.
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.deleted")
    path.rename(hidden)  # first: a kill leaves no half-deleted checkpoint under its name
    delete_hidden(hidden)


def delete_hidden(path: Path) -> None:
    """Delete a hidden folder: a checkpoint's, or a half-written export (``step_exports.py``).

    One that cannot be deleted stays, with a warning: it must not end the run.

    On NFS a file that a process of this node has open comes back under another name, so its folder is not
    empty. FailingDiskError for a file system that fails.
    """
    try:
        remove_folder(path)
    except OSError as error:
        check_not_failing(error, "what is left of a step", path)
        message = f"warning: {path} could not be deleted ({error}); the next save or start tries again"
        print(message, file=sys.stderr, flush=True)


def digest(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _on_every_rank(value: bool) -> bool:
    """Whether ``value`` is true on every rank. Collective."""
    on_all = torch.tensor([value], dtype=torch.int32)
    dist.all_reduce(on_all, dist.ReduceOp.MIN)
    return bool(on_all.item())
