"""Checkpoint store of a run: asynchronous saves, one at a time, and deletion of old checkpoints.

    checkpoints/step_000120/             policy/ (torch_dist)  trainer.json  manifest.json
    checkpoints/step_000120_update_003/  in the middle of step 121, after 3 of its updates

``CheckpointStore.begin`` starts a save; ``finalize`` completes it and deletes old checkpoints. A checkpoint
is written under a hidden name: all ranks write their parts and compute digests in the background; then rank 0
writes the manifest, with the size and digest of every other file, and renames the folder while the others
wait. A folder without a matching manifest is not a checkpoint. ``trainer/flow_control.py`` decides when to
save; ``reader.py`` reads checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

from bapo_megatron import __version__
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.interfaces import Saving
from bapo_megatron.runtime.distributed import all_gather, broadcast_from_main, is_main
from bapo_megatron.runtime.files import remove_folder, sha256_of, sync_file, sync_folder, write_atomically
from bapo_megatron.runtime.run_paths import (
    MANIFEST,
    POLICY,
    TRAINER_STATE,
    Moment,
    RunPaths,
    step_entries,
    step_leftovers,
)
from bapo_megatron.runtime.storage import DiskError, OldFiles, check_readable, writing

_POLL_S = 0.05
_RANK_0_FIRST_S = 120.0
"""Seconds that other ranks wait for rank 0 to end the run after a failed save: torch reports the reason only
on rank 0, and the first failing process decides the exit code."""

Digests = dict[str, dict[str, Any]]
"""Size and SHA-256 by file name."""


@dataclass(frozen=True)
class Saved:
    """A finished save, returned by ``CheckpointStore.finalize``: its step, finished updates of the next step,
    and duration. Equal on every rank."""

    step: int
    updates: int
    """Finished updates of the following step; 0 at the end of a step."""
    seconds: float
    """Seconds from the start of the save until it was on disk with its digests, on the slowest rank."""


class CheckpointStore:
    """Checkpoint store of one run, one object per rank: saves checkpoints and deletes old ones. After
    ``begin`` call ``finalize`` until it returns the save; both are collective, the other methods are for rank
    0. If the disk is full or fails, the rank that meets the error raises DiskError."""

    def __init__(
        self,
        paths: RunPaths,
        config: CheckpointConfig,
        newest: Moment = (0, 0),
        scores: dict[int, float] | None = None,
        is_in_use: Callable[[int], bool] = lambda step: False,
        old: OldFiles | None = None,
    ) -> None:
        """``newest``: (step, updates) of the checkpoint that the run continues from; (0, 0) for none. Rank 0
        only: ``scores``, the validation score of each step, for ``keep_best``; ``is_in_use``, whether an
        export still reads a step's checkpoint; ``old``, which deletes old checkpoints."""
        self._paths, self._config = paths, config
        self._scores, self._is_in_use = scores or {}, is_in_use
        self._old = old or OldFiles()
        self._pending: _PendingCheckpoint | None = None
        self.newest = newest
        """Newest checkpoint that was begun or that the run continues from."""

    def begin(self, moment: Moment, save: Callable[[Path], Saving], trainer: dict[str, Any]) -> None:
        """Begin the asynchronous save of the checkpoint of ``moment``; the previous save must be finalized.
        ``save``: begins to write the policy into a folder. ``trainer``: content of trainer.json. Older
        checkpoints stay if the save fails."""
        assert self._pending is None, "finalize the checkpoint before"
        final = self._paths.checkpoint(*moment)
        temporary = final.with_name(f".{final.name}.{broadcast_from_main(uuid.uuid4().hex[:8])}.tmp")
        with writing(f"the checkpoint of step {moment[0]}", final):
            _on_main(lambda: self._make_empty(temporary))  # all ranks wait: they write into the folder next
            _on_main(lambda: write_atomically(temporary / TRAINER_STATE, json.dumps(trainer, indent=2)))
            saving = save(temporary / POLICY)
        about = {"step": moment[0], "updates": moment[1], "code_version": __version__}
        self._pending, self.newest = _PendingCheckpoint(saving, temporary, final, about), moment

    def finalize(self, wait: bool) -> Saved | None:
        """Complete the pending save if all ranks have written their parts (``wait``: once they have), and
        delete old checkpoints. Return the finished save once; None if pending or without a save."""
        pending = self._pending
        if pending is None:
            return None
        step, updates = self.newest
        with writing(f"the checkpoint of step {step}", pending.final):
            while not pending.advance():
                if not wait:
                    return None
                sleep(_POLL_S)
            self._pending = None
            _on_main(self.delete_old)  # only now: the old ones are needed until the new one is durable
        return Saved(step, updates, pending.seconds)

    def record_score(self, step: int, score: float) -> None:
        """Record the validation score of the weights after ``step``, for ``keep_best``."""
        self._scores[step] = score

    def oldest_step(self) -> int:
        """Return the step of the oldest checkpoint; 0 if there is none."""
        return min((step for (step, _), _ in step_entries(self._paths.checkpoints)), default=0)

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint at their end, in order, up to the newest checkpoint."""
        moments = [moment for moment, _ in step_entries(self._paths.checkpoints)]
        return sorted(step for step, updates in moments if not updates and step <= self.newest[0])

    def delete_old(self) -> None:
        """Delete the checkpoints that ``config`` does not keep and no export reads, on rank 0. Also deletes
        checkpoints later than ``newest``, which the resume has skipped as damaged."""
        entries = sorted(step_entries(self._paths.checkpoints))
        kept = [moment for moment, _ in entries if moment <= self.newest]
        whole_steps = [step for step, updates in kept if not updates]
        recent = kept[-self._config.keep_last :]
        stay = {step for step in whole_steps if self._is_in_use(step)} | self._milestones(whole_steps)
        for moment, path in entries:
            step, updates = moment
            if moment not in recent and (updates or moment > self.newest or step not in stay):
                _remove(path, self._old)

    def _milestones(self, steps: Sequence[int]) -> set[int]:
        """Return the steps that ``keep_every`` and ``keep_best`` keep; among equal scores the latest."""
        every, best = self._config.keep_every, self._config.keep_best
        scored = sorted((self._scores[step], step) for step in steps if step in self._scores)
        milestones = {step for _, step in scored[-best:]} if best else set()
        return milestones | {step for step in steps if every is not None and step % every == 0}

    def _make_empty(self, temporary: Path) -> None:
        clear_leftovers(self._paths, self._old)
        temporary.mkdir(parents=True)


class _PendingCheckpoint:
    """Asynchronous save of one checkpoint, begun on construction; all ranks make the same calls in one order.
    Poll ``advance`` until it returns True: the checkpoint is then on disk under its name. ``advance`` raises
    write errors, on rank 0 first. A process that ends earlier leaves a hidden folder."""

    def __init__(self, saving: Saving, temporary: Path, final: Path, about: dict[str, Any]) -> None:
        """``saving``: background write of the policy in ``temporary``, which is renamed to ``final``.
        ``about``: manifest fields besides the files."""
        self._saving, self._temporary, self.final = saving, temporary, final
        self._about = about
        self._began = perf_counter()
        self.seconds = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._digests: Future[tuple[Digests, float]] | None = None

    def advance(self) -> bool:
        """Advance the save as far as possible without waiting; return whether it is complete. Collective."""
        if self._digests is None:
            if not _on_every_rank(self._saving.is_written()):
                return False
            self._finish_save()
            dist.barrier()  # rank 0 has written the metadata: now all files are there
            mine = _files_of_all_ranks(self._temporary)[dist.get_rank() :: dist.get_world_size()]
            self._digests = self._thread.submit(self._sync_and_digest, mine)
        if not _on_every_rank(self._digests.done()):
            return False
        parts = all_gather(self._digests.result())
        self._thread.shutdown()
        self.seconds = max(seconds for _, seconds in parts)
        digest_of = {name: value for digests, _ in parts for name, value in sorted(digests.items())}
        _on_main(lambda: self._publish({**self._about, "files": digest_of}))
        return True

    def _finish_save(self) -> None:
        """Finish the write of the policy; errors are raised on rank 0 first (see ``_RANK_0_FIRST_S``)."""
        from torch.distributed.checkpoint.api import CheckpointException  # takes a second, with sympy

        try:
            self._saving.finish()
        except CheckpointException as error:
            if not error.failures:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # sent once rank 0 has failed
                sleep(_RANK_0_FIRST_S)
            raise

    def _sync_and_digest(self, files: list[Path]) -> tuple[Digests, float]:
        digests = {}
        for path in files:
            sync_file(path)
            digests[str(path.relative_to(self._temporary))] = digest(path)
        return digests, perf_counter() - self._began

    def _publish(self, manifest: dict[str, Any]) -> None:
        # Write the manifest last and sync every folder before the rename: after a power failure the final
        # name has all files or does not exist.
        write_atomically(self._temporary / MANIFEST, json.dumps(manifest, indent=2))
        for folder in [self._temporary, *(path for path in self._temporary.rglob("*") if path.is_dir())]:
            sync_folder(folder)
        if os.path.lexists(self.final):  # a damaged one, or the run resumed from an older one
            _remove(self.final, OldFiles())
        if os.path.lexists(self.final):
            raise DiskError(
                f"{self.final}, an older checkpoint of the same step, cannot be renamed, and the new one is "
                "not saved: move it away, then give the same command again"
            )
        self._temporary.rename(self.final)
        sync_folder(self.final.parent)


def _files_of_all_ranks(folder: Path) -> list[Path]:
    """Return every file below ``folder``, in one order on every rank. Collective. The union of all ranks'
    lists: an NFS node may list a folder as it was up to a minute ago, without other nodes' recent files. A
    file that is missing in the manifest would be unchecked at a resume and missing in a fork."""
    own = set(_files_below(folder))
    known: set[str] = broadcast_from_main(own)
    return [folder / name for name in sorted(known.union(*all_gather(own - known)))]


def _files_below(folder: Path) -> Iterator[str]:
    for place, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            # NFS keeps a deleted file under such a name while a process has it open: in a manifest it would
            # be a missing file at the next start.
            if not name.startswith(".nfs"):
                yield str((Path(place) / name).relative_to(folder))


def _raise(error: OSError) -> None:
    raise error


def _on_main(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 while the other ranks wait at a barrier. Collective. An error on rank 0 ends
    its process, and the launcher then ends the others."""
    if is_main():
        action()
    dist.barrier()


def clear_leftovers(paths: RunPaths, old: OldFiles | None = None) -> None:
    """Delete half-written and half-deleted checkpoints, left by a killed process or a full disk."""
    folder = paths.checkpoints
    try:
        leftovers = list(step_leftovers(folder))
    except OSError as error:
        check_readable(error, "the list of checkpoints", folder)
        raise
    for leftover in leftovers:
        delete_hidden(leftover, old)


def _remove(path: Path, old: OldFiles) -> None:
    """Delete a checkpoint, or only the link if it is one. A plain file keeps its hidden name; a checkpoint
    that cannot be renamed stays intact."""
    # A unique name, because an earlier failed deletion may still have the plain one.
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.deleted")
    with old.deleting(path):
        path.rename(hidden)  # first: a kill leaves no half-deleted checkpoint under its name
        delete_hidden(hidden, old)


def delete_hidden(path: Path, old: OldFiles | None = None) -> None:
    """Delete a hidden checkpoint or partial export. A failed deletion only warns (on NFS an open file returns
    under another name). Raises FailingDiskError if the file system fails."""
    with (old or OldFiles()).deleting(path):
        remove_folder(path)


def digest(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _on_every_rank(value: bool) -> bool:
    on_all = torch.tensor([value], dtype=torch.int32)
    dist.all_reduce(on_all, dist.ReduceOp.MIN)
    return bool(on_all.item())
