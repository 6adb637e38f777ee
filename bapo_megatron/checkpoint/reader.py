"""Checkpoint reader: ``latest_checkpoint`` returns a run's newest intact checkpoint, every byte verified.

Collective: every rank reads and verifies its share of the files against the manifest. Damaged checkpoints are
skipped; if all are damaged, or recorded ones are gone, every rank raises CheckpointError. A checkpoint that
cannot be read (permissions, failing file system) raises ConfigError or FailingDiskError on the rank that
meets it: the run would otherwise continue from an older one and delete it. The returned ``Checkpoint`` has
only the training loop's state (trainer.json); ``Policy.load`` loads model and optimizer.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bapo_megatron.checkpoint.store import Digests, digest
from bapo_megatron.errors import CheckpointError, printable
from bapo_megatron.runtime.distributed import all_gather, broadcast_from_main, is_main
from bapo_megatron.runtime.files import file_below
from bapo_megatron.runtime.jsonl_log import parse_line, whole_lines
from bapo_megatron.runtime.run_paths import MANIFEST, POLICY, TRAINER_STATE, Moment, RunPaths, step_entries
from bapo_megatron.runtime.storage import check_readable
from checkpoints_tools.formats.locate import manifest_files

READERS = 4
"""Files that a rank verifies concurrently."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk: its path, its step and update, and the training loop's state. Equal on
    every rank; model and optimizer are not loaded yet."""

    path: Path
    moment: Moment
    trainer: dict[str, Any]
    """State of the training loop, as passed to ``CheckpointStore.begin``."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that were skipped, each with its damage."""

    @property
    def step(self) -> int:
        """Last finished step."""
        return self.moment[0]

    @property
    def policy(self) -> Path:
        """Folder of the model and the optimizer."""
        return self.path / POLICY


def latest_checkpoint(paths: RunPaths) -> Checkpoint | None:
    """Return a run's newest intact checkpoint; None if it never had one. Collective.

    Skips a damaged checkpoint with a message. Raises CheckpointError, on every rank, if all are damaged, or
    if their folder is empty but the run has recorded one (an unmounted disk): a start at step 1 would erase
    the run's record, which only the user may decide.
    """
    folder = paths.checkpoints
    problems: list[str] = []
    for moment, path in broadcast_from_main(newest_first(folder) if is_main() else None):
        try:
            return replace(read_checkpoint(path, moment), passed_over=tuple(problems))
        except CheckpointError as error:
            problems.append(f"{path}: {error}")
            if is_main():
                print(printable(f"passing over {problems[-1]}"), flush=True)
    if problems:
        raise CheckpointError(
            "no checkpoint of the run is whole:\n"
            + "\n".join(problems)
            + f"\nrestore one, or move {folder} away to begin at step 1"
        )
    step = broadcast_from_main(_recorded_step(paths.events) if is_main() and folder.is_dir() else None)
    if step is not None:
        raise CheckpointError(
            f"{folder} is empty, and the run has recorded a checkpoint of step {step}: mount its disk or "
            f"restore one, or move {folder} away to begin at step 1, which erases the run's record"
        )
    return None


def _recorded_step(events: Path) -> int | None:
    """Return the step of the last recorded checkpoint since the run began at step 1; None without one."""
    step = None
    for number, line in enumerate(whole_lines(events) if events.exists() else (), 1):
        if b'"start"' in line or b'"checkpoint"' in line:  # few of a long run's events
            row = parse_line(line, events, number)
            step = {"start": None, "checkpoint": row.get("step")}.get(str(row.get("kind")), step)
    return step


def newest_first(folder: Path) -> list[tuple[Moment, Path]]:
    """Return the unverified checkpoints in ``folder``, newest first. Raises ConfigError or FailingDiskError
    if the folder cannot be listed."""
    try:
        return sorted(step_entries(folder), reverse=True)
    except OSError as error:
        check_readable(error, "the list of checkpoints", folder)
        raise


def read_checkpoint(path: Path, moment: Moment) -> Checkpoint:
    """Verify and return the checkpoint in ``path``; raise CheckpointError on all ranks if damaged.
    Collective."""
    files, problem = broadcast_from_main(manifest_of(path) if is_main() else None)
    if damage := problem or next(filter(None, all_gather(_first_damage(path, files))), None):
        raise CheckpointError(damage)
    trainer = broadcast_from_main(json.loads((path / TRAINER_STATE).read_bytes()) if is_main() else None)
    return Checkpoint(path, moment, trainer)


def manifest_of(path: Path) -> tuple[Digests, str | None]:
    """Return the manifest's digests, largest file first, and why it cannot be used, if so. Not collective."""
    try:
        files = dict(sorted(manifest_files(path).items(), key=lambda item: -item[1]["bytes"]))
    except (CheckpointError, KeyError, TypeError) as error:
        check_readable(error, MANIFEST, path)
        return {}, f"its manifest cannot be read: {error}"
    return (files, None) if TRAINER_STATE in files else ({}, f"its manifest lists no {TRAINER_STATE}")


def _first_damage(path: Path, files: Digests) -> str | None:
    """Return the first damage in this rank's share, every n-th file of n ranks; None without damage."""
    mine = list(files)[dist.get_rank() :: dist.get_world_size()]
    with ThreadPoolExecutor(READERS, thread_name_prefix="verify") as pool:
        return next(filter(None, pool.map(lambda name: _damage(path, name, files[name]), mine)), None)


def _damage(path: Path, name: str, recorded: dict[str, Any]) -> str | None:
    try:
        actual = digest(file_below(path, name))
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"
    except (CheckpointError, OSError) as error:
        check_readable(error, name, path)
        return str(error)
    return f"{name} differs from the manifest" if actual != recorded else None
