"""Checkpoints of a run: whole or absent.

    checkpoints/step_000120/  policy/ (torch_dist)  trainer.json  manifest.json

A checkpoint is written under a temporary name, its manifest (with the size and digest of every other
file) last, then renamed. A folder without a manifest that matches its files does not count.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bapo_megatron import __version__
from bapo_megatron.disk import writing
from bapo_megatron.ending import end_helpers
from bapo_megatron.errors import CheckpointError
from bapo_megatron.files import sync_file, sync_folder, write_atomically

_NAME = re.compile(r"step_(\d{6,})")
_MANIFEST = "manifest.json"

_RANK_0_FIRST_S = 120.0
"""torch tells what went wrong to rank 0 alone. The other ranks give it time to say so and to end the run: who
fails first decides the exit code."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int
    trainer: dict[str, Any]
    """What the loop needs to go on, as given to ``save``."""

    @property
    def policy(self) -> Path:
        """Folder of the model and the optimizer."""
        return self.path / "policy"


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        self.folder = run_dir / "checkpoints"
        self.keep_last = keep_last

    def save(self, step: int, save_policy: Callable[[Path], None], trainer: dict[str, Any]) -> None:
        """Write the checkpoint of ``step``. Collective; the files are on disk when it returns.

        RunStopped, on the rank that meets it, if the disk does not take it; the older ones stay.
        """
        final = self.folder / f"step_{step:06d}"
        with writing(f"the checkpoint of step {step}", final):
            self._save(step, final, save_policy, trainer)

    def _save(
        self, step: int, final: Path, save_policy: Callable[[Path], None], trainer: dict[str, Any]
    ) -> None:
        temporary = self.folder / f".{final.name}.tmp"
        _on_main(lambda: self._start(temporary))
        try:
            save_policy(temporary / "policy")
        except CheckpointException as error:
            if not error.failures:
                _leave_the_word_to_rank_0()
            raise
        _on_main(lambda: write_atomically(temporary / "trainer.json", json.dumps(trainer, indent=2)))
        manifest = {"step": step, "code_version": __version__, "files": _digests(temporary)}
        _on_main(lambda: _publish(temporary, final, manifest))
        _on_main(lambda: self._delete_all_but(step))

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, None if there never was one. Reads every byte of it.

        Broken ones are passed over and named. CheckpointError if all are broken: to begin anew would
        erase the run's record, and that is for a person to decide.
        """
        problems = []
        for step, path in sorted(self._folders(), reverse=True):
            try:
                return _read(path, step)
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
        return min((step for step, _ in self._folders()), default=0)

    def _folders(self) -> Iterator[tuple[int, Path]]:
        for path in self.folder.glob("step_*"):
            if match := _NAME.fullmatch(path.name):
                yield int(match[1]), path

    def _start(self, temporary: Path) -> None:
        """An empty folder to write into."""
        self.clear_leftovers()
        temporary.mkdir(parents=True)

    def _delete_all_but(self, newest: int) -> None:
        """Keep ``newest`` and those before it that are to be kept. Later ones were passed over: they go."""
        earlier = sorted(folder for folder in self._folders() if folder[0] <= newest)
        stale = [folder for folder in self._folders() if folder[0] > newest]
        for _, path in stale + (earlier[: -self.keep_last] if self.keep_last else []):
            _remove(path)


def _on_main(action: Callable[[], None]) -> None:
    """Do it on rank 0 while the others wait; an error there ends them all."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _leave_the_word_to_rank_0() -> None:
    """It ends this rank by SIGTERM, whose helpers would stay."""

    def leave(*_: object) -> None:
        end_helpers()
        sys.exit(3)

    signal.signal(signal.SIGTERM, leave)
    time.sleep(_RANK_0_FIRST_S)


def _remove(path: Path) -> None:
    """Delete a checkpoint; its name goes first, so that no half of it is ever met under it."""
    hidden = path.with_name(f".{path.name}.deleted")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _digests(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file, each synced to disk. Collective: the ranks share the work."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    mine = {}
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        sync_file(path)
        mine[str(path.relative_to(folder))] = _digest(path)
    parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return {name: value for part in parts for name, value in sorted(part.items())}


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _publish(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    write_atomically(temporary / _MANIFEST, json.dumps(manifest, indent=2))
    for folder in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
        sync_folder(folder)
    if final.exists():  # broken, or the run was continued from an older one
        _remove(final)
    temporary.rename(final)
    sync_folder(final.parent)


def _read(path: Path, step: int) -> Checkpoint:
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        files = dict(manifest["files"])
    except FileNotFoundError:
        raise CheckpointError("it has no manifest") from None
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its manifest cannot be read: {error!r}") from None
    for name, recorded in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{name} is missing")
        if _digest(path / name) != recorded:
            raise CheckpointError(f"{name} differs from the manifest")
    return Checkpoint(path, step, json.loads((path / "trainer.json").read_text()))
