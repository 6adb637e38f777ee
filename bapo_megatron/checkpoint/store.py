"""Checkpoints of a run: whole or absent.

    checkpoints/step_000120/             policy/ (torch_dist)  trainer.json  manifest.json
    checkpoints/step_000120_update_003/  within step 121, after 3 of its updates

A checkpoint is written under a temporary name while the training goes on; its manifest (with the size and
digest of every other file) comes last, then it is renamed. A folder without a manifest that matches its files
does not count.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import torch.distributed as dist

from bapo_megatron import __version__
from bapo_megatron.checkpoint.run_directory import CHECKPOINT_NAME
from bapo_megatron.checkpoint.writer import MANIFEST, Digests, PendingCheckpoint, digest, on_main, remove
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.errors import CheckpointError
from bapo_megatron.interfaces import Saving
from bapo_megatron.runtime.distributed import is_main, share
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.storage import writing

_POLL_S = 0.05

READERS = 4
"""Files that a rank verifies at a time."""

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
        self.holds: Callable[[int], bool] = lambda step: False
        """Whether somebody still reads the checkpoint of a step, which then stays."""
        self.scores: dict[int, float] = {}
        """What the weights of a step are worth, for ``keep_best``. Rank 0's."""

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

    def finalize(self, wait: bool) -> Saved | None:
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
            on_main(self.delete_old)
        return Saved(step, updates, pending.seconds)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, None if there never was one. Collective: each rank reads its share.

        Broken ones are passed over and named. CheckpointError if all are broken: to begin anew would
        erase the run's record, and that is for a person to decide.
        """
        problems = []
        for moment, path in share(sorted(self._folders(), reverse=True)):
            try:
                return _read(path, moment)
            except CheckpointError as error:
                problems.append(f"{path}: {error}")
                if is_main():
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

    def steps(self) -> list[int]:
        """Those with a checkpoint at their end, up to the newest that counts."""
        return sorted(
            step for (step, updates), _ in self._folders() if not updates and step <= self.newest[0]
        )

    def delete_old(self) -> None:
        """Keep the newest and those before it that are to be kept, on rank 0. Later ones were passed over:
        they go."""
        found = sorted(self._folders())
        kept = [moment for moment, _ in found if moment <= self.newest]
        whole_steps = [step for step, updates in kept if not updates]
        recent = kept[-self._config.keep_last :]
        stay = {step for step in whole_steps if self.holds(step)} | self._milestones(whole_steps)
        for moment, path in found:
            step, updates = moment
            if moment not in recent and (updates or moment > self.newest or step not in stay):
                remove(path)

    def _milestones(self, steps: Sequence[int]) -> set[int]:
        """Those of ``steps`` that ``keep_every`` and ``keep_best`` name; of equally good ones the later."""
        every, best = self._config.keep_every, self._config.keep_best
        scored = sorted((self.scores[step], step) for step in steps if step in self.scores)
        found = {step for _, step in scored[-best:]} if best else set()
        return found | {step for step in steps if every is not None and step % every == 0}

    def _folders(self) -> Iterator[tuple[Moment, Path]]:
        for path in self.folder.glob("step_*"):
            if match := CHECKPOINT_NAME.fullmatch(path.name):
                yield (int(match[1]), int(match[2] or 0)), path

    def _start(self, temporary: Path) -> None:
        """An empty folder to write into."""
        self.clear_leftovers()
        temporary.mkdir(parents=True)


def _read(path: Path, moment: Moment) -> Checkpoint:
    """The checkpoint, or CheckpointError on every rank alike. Collective."""
    files, problem = share(_manifest(path) if is_main() else None)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, _differences(path, files))
    if found := problem or next((told for told in problems if told), None):
        raise CheckpointError(found)
    trainer = share(json.loads((path / "trainer.json").read_text()) if is_main() else None)
    return Checkpoint(path, moment, trainer)


def _manifest(path: Path) -> tuple[Digests, str | None]:
    """What the files must be, the largest first; or why nobody knows."""
    try:
        files = dict(json.loads((path / MANIFEST).read_text())["files"])
        return dict(sorted(files.items(), key=lambda item: -item[1]["bytes"])), None
    except FileNotFoundError:
        return {}, "it has no manifest"
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        return {}, f"its manifest cannot be read: {error!r}"


def _differences(path: Path, files: Digests) -> str | None:
    """What is wrong with the first bad file of this rank's share. Files come in turn to the ranks."""
    mine = list(files)[dist.get_rank() :: dist.get_world_size()]
    with ThreadPoolExecutor(READERS, thread_name_prefix="verify") as pool:
        return next(filter(None, pool.map(lambda name: _wrong(path, name, files[name]), mine)), None)


def _wrong(path: Path, name: str, recorded: dict[str, Any]) -> str | None:
    if not (path / name).is_file():
        return f"{name} is missing"
    return f"{name} differs from the manifest" if digest(path / name) != recorded else None
