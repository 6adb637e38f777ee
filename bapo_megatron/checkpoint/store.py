"""Checkpoint store of a run: asynchronous saves, one at a time, and the deletion of old checkpoints.

    checkpoints/step_000120/             policy/ (torch_dist)  trainer.json  manifest.json
    checkpoints/step_000120_update_003/  in the middle of step 121, after 3 of its updates

A checkpoint is written under a temporary name while training continues. Its manifest, with the size and the
digest of every other file, is written last; then the folder is renamed. A folder without a matching manifest
is no checkpoint. The trainer decides when to save (``trainer/flow_control.py``), the reader of a resumed run
is ``reader.py``. Used by ``trainer/build.py``, ``trainer/records/recorder.py`` and
``benchmarks/checkpoint_stall.py``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

from bapo_megatron import __version__
from bapo_megatron.checkpoint.writer import PendingCheckpoint, clear_leftovers, on_main, remove
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.interfaces import Saving
from bapo_megatron.runtime.distributed import broadcast_from_main
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import TRAINER_STATE, Moment, RunPaths, step_entries
from bapo_megatron.runtime.storage import writing

_POLL_S = 0.05


@dataclass(frozen=True)
class Saved:
    """A finished save, as plain data: what ``CheckpointStore.finalize`` returns, equal on every rank."""

    step: int
    updates: int
    """Updates of the following step that it contains; 0 at the end of a step."""
    seconds: float
    """Time from the start of the save until it was on disk with its digests, on the slowest rank."""


class CheckpointStore:
    """Checkpoint store of one run, on every rank: begins, finalizes and deletes checkpoints.

    After ``begin`` call ``finalize`` until it returns the save; both are collective, the other methods are
    for rank 0. RunStopped, on the rank that meets it, if the disk is full or fails. Made by
    ``trainer/build.py``, called by ``trainer/flow_control.py``.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        newest: Moment = (0, 0),
        scores: dict[int, float] | None = None,
        is_in_use: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """The store of ``run_dir``.

        ``newest``: (step, updates) of the checkpoint that the run continues from; (0, 0) for none.
        ``scores``: the validation score of each step, for ``keep_best``; needed on rank 0 alone.
        ``is_in_use``: whether an export still reads the checkpoint of a step; asked on rank 0 alone.
        """
        self._paths, self._config = RunPaths(run_dir), config
        self._scores, self._is_in_use = scores or {}, is_in_use
        self._pending: PendingCheckpoint | None = None
        self.newest = newest
        """The newest checkpoint that was begun, or that the run continues from."""

    def begin(
        self, moment: Moment, folders: Mapping[str, Callable[[Path], Saving]], trainer: dict[str, Any]
    ) -> None:
        """Begin the asynchronous save of the checkpoint of ``moment`` (step, updates). Collective.

        ``finalize`` completes it; the previous save must have been finalized. ``folders``: for the name of
        each folder of the checkpoint the function that begins to write it. ``trainer``: content of
        trainer.json.

        RunStopped, on the rank that meets it, if the disk is full or fails; older checkpoints stay.
        """
        assert self._pending is None, "finalize the checkpoint before"
        final = self._paths.checkpoint(*moment)
        temporary = final.with_name(f".{final.name}.{broadcast_from_main(uuid.uuid4().hex[:8])}.tmp")
        with writing(f"the checkpoint of step {moment[0]}", final):
            on_main(lambda: self._make_empty(temporary))  # all ranks wait: they write into the folder next
            on_main(lambda: write_atomically(temporary / TRAINER_STATE, json.dumps(trainer, indent=2)))
            savings = [write(temporary / name) for name, write in folders.items()]
        about = {"step": moment[0], "updates": moment[1], "code_version": __version__}
        self._pending, self.newest = PendingCheckpoint(savings, temporary, final, about), moment

    def finalize(self, wait: bool) -> Saved | None:
        """Complete the pending save if all ranks have written their parts; ``wait`` blocks until they have.

        Returns the finished save, once; None while it is pending or if there is none. Collective. A complete
        save also deletes old checkpoints.
        """
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
            on_main(self.delete_old)  # only now: until the new one is durable the old ones are needed
        return Saved(step, updates, pending.seconds)

    def record_score(self, step: int, score: float) -> None:
        """Record the validation score of the weights of ``step``, for ``keep_best``."""
        self._scores[step] = score

    def oldest_step(self) -> int:
        """The step of the oldest checkpoint; 0 if there is none."""
        return min((step for (step, _), _ in step_entries(self._paths.checkpoints)), default=0)

    def steps(self) -> list[int]:
        """Steps with a checkpoint at their end, in order, up to the newest checkpoint."""
        found = [moment for moment, _ in step_entries(self._paths.checkpoints)]
        return sorted(step for step, updates in found if not updates and step <= self.newest[0])

    def delete_old(self) -> None:
        """Retention policy: delete the checkpoints that ``config`` does not keep. On rank 0 alone.

        Checkpoints later than the newest are deleted, too: the resume has passed over them as damaged.
        """
        found = sorted(step_entries(self._paths.checkpoints))
        kept = [moment for moment, _ in found if moment <= self.newest]
        whole_steps = [step for step, updates in kept if not updates]
        recent = kept[-self._config.keep_last :]
        stay = {step for step in whole_steps if self._is_in_use(step)} | self._milestones(whole_steps)
        for moment, path in found:
            step, updates = moment
            if moment not in recent and (updates or moment > self.newest or step not in stay):
                remove(path)

    def _milestones(self, steps: Sequence[int]) -> set[int]:
        """Steps that ``keep_every`` and ``keep_best`` keep; of equal scores the latest."""
        every, best = self._config.keep_every, self._config.keep_best
        scored = sorted((self._scores[step], step) for step in steps if step in self._scores)
        found = {step for _, step in scored[-best:]} if best else set()
        return found | {step for step in steps if every is not None and step % every == 0}

    def _make_empty(self, temporary: Path) -> None:
        clear_leftovers(self._paths.root)
        temporary.mkdir(parents=True)
