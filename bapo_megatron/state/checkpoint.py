"""Checkpoints of a run: whole or absent.

    checkpoints/step_000120/             policy/ (torch_dist)  trainer.json  manifest.json
    checkpoints/step_000120_update_003/  within step 121, after 3 of its updates

A checkpoint is written under a temporary name while the training goes on; its manifest (with the size and
digest of every other file) comes last, then it is renamed. A folder without a manifest that matches its files
does not count.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

from bapo_megatron import __version__
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.disk import writing
from bapo_megatron.distributed import share
from bapo_megatron.errors import CheckpointError
from bapo_megatron.files import write_atomically
from bapo_megatron.interfaces import Saving
from bapo_megatron.state.pending import MANIFEST, PendingCheckpoint, digest, on_main, remove

_NAME = re.compile(r"step_(\d{6,})(?:_update_(\d{3,}))?")
_POLL_S = 0.05

Moment = tuple[int, int]
"""Steps that were finished, and updates of the next one that were made."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    moment: Moment
    trainer: dict[str, Any]
    """What the loop needs to go on, as given to ``begin``."""

    @property
    def step(self) -> int:
        """The last that was finished."""
        return self.moment[0]

    @property
    def policy(self) -> Path:
        """Folder of the model and the optimizer."""
        return self.path / "policy"


@dataclass(frozen=True)
class Saved:
    """What has been written."""

    step: int
    updates: int
    """Of the step after it."""
    seconds: float
    """From its beginning until it was on disk with its digests, on the slowest rank."""


class CheckpointStore:
    """The checkpoints of one run. What writes is collective."""

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        self.folder = run_dir / "checkpoints"
        self._config = config
        self._pending: PendingCheckpoint | None = None
        self.newest: Moment = (0, 0)
        """Of which a checkpoint was begun, or that the run continues."""

    def begin(self, moment: Moment, save_policy: Callable[[Path], Saving], trainer: dict[str, Any]) -> None:
        """Begin to write the checkpoint of ``moment``; the one before it is settled. ``settle`` ends it.

        RunStopped, on the rank that meets it, if the disk does not take it; the older ones stay.
        """
        assert self._pending is None, "settle the checkpoint before"
        step, updates = moment
        final = self.folder / (f"step_{step:06d}" + (f"_update_{updates:03d}" if updates else ""))
        temporary = self.folder / f".{final.name}.{share(uuid.uuid4().hex[:8])}.tmp"
        with writing(f"the checkpoint of step {step}", final):
            on_main(lambda: self._start(temporary))
            on_main(lambda: write_atomically(temporary / "trainer.json", json.dumps(trainer, indent=2)))
            saving = save_policy(temporary / "policy")
        about = {"step": step, "updates": updates, "code_version": __version__}
        self._pending, self.newest = PendingCheckpoint(saving, temporary, final, about), moment

    def settle(self, wait: bool) -> Saved | None:
        """The checkpoint that has become whole since the last call, if one has, or after a ``wait``."""
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
            on_main(lambda: self._delete_all_but(self.newest))
        return Saved(step, updates, pending.seconds)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, None if there never was one. Reads every byte of it.

        Broken ones are passed over and named. CheckpointError if all are broken: to begin anew would
        erase the run's record, and that is for a person to decide.
        """
        problems = []
        for moment, path in sorted(self._folders(), reverse=True):
            try:
                return _read(path, moment)
            except CheckpointError as error:
                problems.append(f"{path}: {error}")
                print(f"passing over {problems[-1]}", flush=True)
        if problems:
            raise CheckpointError(
                "no checkpoint of the run is whole:\n"
                + "\n".join(problems)
                + f"\nrestore one, or move {self.folder} away to begin at step 1"
            )
        return None

    def clear_leftovers(self) -> None:
        """Delete what a process that was killed, or met a full disk, left half-written or half-deleted."""
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover)

    def oldest_step(self) -> int:
        """Of the checkpoints that are there; 0 if there is none."""
        return min((step for (step, _), _ in self._folders()), default=0)

    def _folders(self) -> Iterator[tuple[Moment, Path]]:
        for path in self.folder.glob("step_*"):
            if match := _NAME.fullmatch(path.name):
                yield (int(match[1]), int(match[2] or 0)), path

    def _start(self, temporary: Path) -> None:
        """An empty folder to write into."""
        self.clear_leftovers()
        temporary.mkdir(parents=True)

    def _delete_all_but(self, newest: Moment) -> None:
        """Keep ``newest`` and those before it that are to be kept. Later ones were passed over: they go."""
        every, last = self._config.keep_every, self._config.keep_last
        found = sorted(self._folders())
        recent = [moment for moment, _ in found if moment <= newest][-last:]
        for moment, path in found:
            step, updates = moment
            is_milestone = every is not None and step % every == 0 and not updates and moment <= newest
            if not (moment in recent or is_milestone):
                remove(path)


def _read(path: Path, moment: Moment) -> Checkpoint:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = dict(manifest["files"])
    except FileNotFoundError:
        raise CheckpointError("it has no manifest") from None
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its manifest cannot be read: {error!r}") from None
    for name, recorded in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{name} is missing")
        if digest(path / name) != recorded:
            raise CheckpointError(f"{name} differs from the manifest")
    return Checkpoint(path, moment, json.loads((path / "trainer.json").read_text()))
