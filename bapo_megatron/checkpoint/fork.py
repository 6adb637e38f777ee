"""Fork (``--fork``): new run from another run's checkpoint, with its weights, optimizer and data position.

    NEW/checkpoints/step_000120/   the other run's checkpoint: hard links to its files, or copies
    NEW/fork.json                  record of its origin (``fork_record.py``)

``check_fork`` is the preflight, before process groups exist, and raises ConfigError. ``make_fork``, which all
ranks of the new run call, creates these files; the run then continues from that checkpoint as in a resume,
which verifies it. The other run is only read, and may be training.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from bapo_megatron.checkpoint.fork_record import Fork, ForkSource, Origin, read_fork, write_fork
from bapo_megatron.checkpoint.reader import READERS, manifest_of, newest_first
from bapo_megatron.checkpoint.run_directory import read_config
from bapo_megatron.checkpoint.store import clear_leftovers
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.runtime.distributed import broadcast_from_main, is_main, on_all_ranks
from bapo_megatron.runtime.files import file_below, remove_folder, sync_file, sync_folder
from bapo_megatron.runtime.run_paths import MANIFEST, RunPaths, step_entries
from bapo_megatron.runtime.storage import writing

# --- preflight ---


def check_fork(config: RunConfig, source: ForkSource | None) -> None:
    """Preflight: raise ConfigError if the fork of ``source`` cannot be made or resumed; with None (no
    ``--fork``), if the run directory is an unfinished fork. A resumed fork does not need the other run."""
    paths = config.paths
    fork, is_begun = read_fork(config.directory), _has_checkpoint(paths)
    if source is None:
        if fork and not is_begun:
            raise ConfigError(
                f"{config.directory} is a fork of {fork.origin}, and holds no checkpoint (yet): give "
                f"--fork {fork.origin.run}:{fork.origin.step} to make it, or another --run-dir"
            )
        return
    if fork is not None:
        source = _same_source(config.directory, fork, source)
        if is_begun:
            return
    elif is_begun or any(path.exists() for path in (paths.config, paths.metrics, paths.journal)):
        raise ConfigError(
            f"--fork {source}: {paths.root} is a run already, which is not a fork of it; give a new --run-dir"
        )
    step, _ = _candidate(source)
    if step >= config.steps:
        raise ConfigError(
            f"--fork {source}: the checkpoint is that of step {step}, and steps={config.steps}: nothing "
            f"would be left to train; raise --steps, which counts from the beginning of the first run"
        )


def _same_source(directory: Path, fork: Fork, source: ForkSource) -> ForkSource:
    """Return ``source`` with the step of ``fork``; raise ConfigError if it names another checkpoint."""
    same_run = str(source.run.resolve()) == fork.origin.run
    if not same_run or source.step not in (None, fork.origin.step):
        raise ConfigError(
            f"--fork {source}: {directory} is a fork of {fork.origin}; leave --fork out to continue it, or "
            "give another --run-dir"
        )
    return replace(source, step=fork.origin.step)


def _candidate(source: ForkSource) -> tuple[int, Path]:
    """Return step and path of the checkpoint that ``source`` names; raise ConfigError if there is none. A
    checkpoint within a step does not count: the batch of that step belongs to the other run."""
    entries = newest_first(RunPaths(source.run).checkpoints)
    whole = {step: path for (step, updates), path in entries if not updates}
    step = max(whole, default=None) if source.step is None else source.step
    if step is not None and step in whole:
        return step, whole[step]
    raise ConfigError(
        f"--fork {source}: no checkpoint between two steps can be taken; {source.run} has those of the steps "
        f"{sorted(whole)} (checkpoint.keep_last and keep_every of that run say which stay)"
    )


def _has_checkpoint(paths: RunPaths) -> bool:
    return any(step_entries(paths.checkpoints))


# --- the fork itself ---


def make_fork(config: RunConfig, source: ForkSource) -> None:
    """Make the run directory, locked by rank 0, a fork of ``source``, unless it is one already. Collective.
    Raises ConfigError if the checkpoint has no manifest or is deleted; RunStopped if the disk is full or
    fails."""
    paths = config.paths
    fork = broadcast_from_main(read_fork(paths.root) if is_main() else None)
    if fork is not None:
        if broadcast_from_main(_has_checkpoint(paths) if is_main() else None):
            return
        source = _same_source(paths.root, fork, source)
    step, checkpoint = on_all_ranks(lambda: _candidate(source) if is_main() else (0, Path()))[0]
    final = paths.checkpoint(step)
    hidden = final.with_name(f".{final.name}.{broadcast_from_main(uuid.uuid4().hex[:8])}.tmp")
    try:
        files = on_all_ranks(lambda: _begin(checkpoint, hidden, paths) if is_main() else [])[0]
        on_all_ranks(lambda: _link_share(checkpoint, hidden, files))
        # Publish last: until then the checkpoint has a hidden name, and a killed process leaves no run.
        on_all_ranks(lambda: _publish(paths, source, hidden, step) if is_main() else None)
    except CheckpointError as error:
        raise ConfigError(
            f"--fork {source}: the checkpoint of step {step} cannot be taken: {error}; name another by "
            f"--fork {source.run}:STEP"
        ) from None
    finally:
        if is_main():
            remove_folder(hidden, ignore_errors=True)  # otherwise a full disk stays full


def _begin(checkpoint: Path, hidden: Path, paths: RunPaths) -> list[str]:
    """Make the folders of the new checkpoint, and return the names of its files."""
    clear_leftovers(paths)
    files, problem = manifest_of(checkpoint)
    if problem is not None:
        raise CheckpointError(problem)
    with writing("the checkpoint of a fork", hidden):
        for name in files:
            (hidden / name).parent.mkdir(parents=True, exist_ok=True)
    return [*files, MANIFEST]


def _link_share(checkpoint: Path, hidden: Path, files: list[str]) -> None:
    """Link or copy this rank's share of the files durably, every n-th of n ranks."""
    mine = files[dist.get_rank() :: dist.get_world_size()]
    with (
        writing("the checkpoint of a fork", hidden),
        ThreadPoolExecutor(READERS, thread_name_prefix="fork") as pool,
    ):
        try:
            list(pool.map(lambda name: _link(file_below(checkpoint, name), hidden / name), mine))
        except FileNotFoundError as error:
            raise CheckpointError(f"{error.filename} is missing, or its run has deleted it") from None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        sync_file(target)


def _publish(paths: RunPaths, source: ForkSource, hidden: Path, step: int) -> None:
    other, final = source.run.resolve(), paths.checkpoint(step)
    fork = Fork(
        Origin(str(other), step),
        hashlib.sha256((hidden / MANIFEST).read_bytes()).hexdigest(),
        read_config(other) or {},
        before.lineage if (before := read_fork(other)) else (),
    )
    # fork.json first: without it the checkpoint would look like the run's own.
    with writing("the record of a fork", paths.fork):
        for folder in [hidden, *(path for path in hidden.rglob("*") if path.is_dir())]:
            sync_folder(folder)
        write_fork(paths, fork)
        hidden.rename(final)
        sync_folder(final.parent)
    print(f"{paths.root}: forked from {fork.origin}", flush=True)
