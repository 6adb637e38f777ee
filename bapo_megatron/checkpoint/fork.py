"""Fork (``--fork``): new run from another run's checkpoint, with its weights, optimizer and data position.

    NEW/checkpoints/step_000120/   the other run's checkpoint: hard links to its files, or copies
    NEW/fork.json                  its origin (``fork_record.py``)

``check_fork`` is the preflight, before process groups exist, and raises ConfigError. ``make_fork`` is
collective: it creates these files, before the new run searches for its checkpoint. The other run may be
training and is only read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from bapo_megatron.checkpoint.fork_record import Fork, ForkSource, Origin, read_fork, write_fork
from bapo_megatron.checkpoint.reader import READERS, manifest_of, newest_first, read_checkpoint
from bapo_megatron.checkpoint.run_directory import read_config
from bapo_megatron.checkpoint.store import clear_leftovers
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import CheckpointError, ConfigError, printable
from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.runtime.distributed import broadcast_from_main, is_main, on_all_ranks
from bapo_megatron.runtime.files import file_below, remove_folder, sync_file, sync_folder
from bapo_megatron.runtime.run_paths import MANIFEST, RunPaths, step_entries
from bapo_megatron.runtime.storage import writing

T = TypeVar("T")

_MEET_S = 5.0
"""Seconds that rank 0 copies before the ranks synchronize again, so that no collective times out."""

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a refused hard link; a copy is tried next."""


# --- preflight ---


def check_fork(config: RunConfig, source: ForkSource | None) -> None:
    """Preflight: raise ConfigError if ``--fork`` or a run directory with a fork cannot be used. A directory
    that already is this fork is resumed, even if the other run is gone."""
    fork, is_begun = read_fork(config.directory), _has_checkpoint(config.paths)
    if source is None:
        if fork and not is_begun:
            raise ConfigError(
                f"{config.directory} is a fork of {fork.origin}, and holds no checkpoint (yet): give "
                f"--fork {fork.origin.run}:{fork.origin.step} to make it, or another --run-dir"
            )
        return
    if fork is None:
        _check_new(config.paths, source)
    else:
        source = _same_source(config.directory, fork, source)
        if is_begun:
            return
    _check_source(config, source)


def _same_source(directory: Path, fork: Fork, source: ForkSource) -> ForkSource:
    """Return ``source`` with the step of ``fork``; raise ConfigError if it names another checkpoint."""
    same_run = str(source.run.resolve()) == fork.origin.run
    if not same_run or source.step not in (None, fork.origin.step):
        raise ConfigError(
            f"--fork {source}: {directory} is a fork of {fork.origin}; leave --fork out to continue it, or "
            "give another --run-dir"
        )
    return replace(source, step=fork.origin.step)


def _check_new(paths: RunPaths, source: ForkSource) -> None:
    if source.run.resolve() == paths.root.resolve():
        raise ConfigError(f"--fork {source}: that is this run's own directory; give a new --run-dir")
    if _has_checkpoint(paths) or any(path.exists() for path in (paths.config, paths.metrics, paths.journal)):
        raise ConfigError(
            f"--fork {source}: {paths.root} is a run already, which is not a fork of it; give a new --run-dir"
        )


def _check_source(config: RunConfig, source: ForkSource) -> None:
    settings = read_config(source.run)
    if settings is None:
        raise ConfigError(
            f"--fork {source}: {source.run} is not a run directory: it has no {source.paths.config.name}"
        )
    step = max(_candidates(source, {}))
    theirs = Path(settings["model.hf_path"])
    if (theirs / "config.json").is_file():
        other, ours = _sizes(read_model_shape(theirs)), _sizes(read_model_shape(config.model.hf_path))
        if differ := [name for name in other if other[name] != ours[name]]:
            told = ", ".join(f"{name} {other.get(name, 0)}, here {ours.get(name, 0)}" for name in differ)
            raise ConfigError(
                f"--fork {source}: its weights do not fit model.hf_path={config.model.hf_path} ({told}); all "
                f"other settings may differ, the shape of the model may not"
            )
    if step >= config.steps:
        raise ConfigError(
            f"--fork {source}: the checkpoint is that of step {step}, and steps={config.steps}: nothing "
            f"would be left to train; raise --steps, which counts from the beginning of the first run"
        )


def _sizes(shape: ModelShape) -> dict[str, object]:
    """Return the sizes that determine a model's tensor names and shapes, by their names in messages."""
    sizes = {name: getattr(shape, name) for name in ("layers", "hidden", "ffn", "vocab", "tied")}
    return sizes | {name: size for kind in shape.kinds for name, size in kind.sizes().items()}


def _candidates(source: ForkSource, refused: dict[int, str]) -> dict[int, Path]:
    """Return the candidate checkpoints of ``source`` by step, except ``refused``; raise ConfigError if none
    is left. A checkpoint within a step is no candidate: the batch of its step belongs to the other run."""
    entries = dict(newest_first(source.paths.checkpoints))
    whole = {step: path for (step, updates), path in entries.items() if not updates}
    left = {step: path for step, path in sorted(whole.items()) if step not in refused}
    chosen = left if source.step is None else {s: path for s, path in left.items() if s == source.step}
    if chosen:
        return chosen
    told = [f"step {step}: {why}" for step, why in refused.items()]
    if left:
        told.append(f"there are checkpoints of the steps {', '.join(map(str, left))}")
    else:
        within = [f"one within step {step + 1}" for (step, updates) in sorted(entries) if updates]
        told.append(f"there is {within[-1]}, and a fork begins between two" if within else "there is none")
    what = "no checkpoint" if source.step is None else f"no whole checkpoint of step {source.step}"
    raise ConfigError(
        f"--fork {source}: {what} can be taken; {'; '.join(told)} (checkpoint.keep_last and keep_every of "
        f"that run say which stay)"
    )


def _has_checkpoint(paths: RunPaths) -> bool:
    return any(step_entries(paths.checkpoints))


# --- the fork itself ---


def make_fork(config: RunConfig, source: ForkSource) -> None:
    """Make the run directory a fork of ``source``, unless it is one; its lock must be held. Collective.
    Without a step in ``source``, damaged checkpoints, or ones that the other run deletes meanwhile, are
    skipped with a message. Raises ConfigError if none is left; RunStopped if the disk is full or fails."""
    paths = config.paths
    fork = broadcast_from_main(read_fork(paths.root) if is_main() else None)
    if fork is not None:
        if broadcast_from_main(_has_checkpoint(paths) if is_main() else None):
            return
        source = _same_source(paths.root, fork, source)
    refused: dict[int, str] = {}
    while True:
        candidates = _on_main(lambda: _candidates(source, refused))
        step = max(candidates)
        hidden, problem = _copied(candidates[step], paths, step)
        if problem is None:
            break
        refused[step] = problem
        if is_main():
            passed = f"--fork {source}: passing over the checkpoint of step {step}: {problem}"
            print(printable(passed), flush=True)
    # Publish last: until then the checkpoint has a hidden name, and a killed process leaves no run.
    _on_main(lambda: _publish(paths, source, hidden, step))


def _copied(checkpoint: Path, paths: RunPaths, step: int) -> tuple[Path, str | None]:
    """Copy and verify ``checkpoint`` under a hidden name; return its path and any failure. Collective."""
    final = paths.checkpoint(step)
    hidden = final.with_name(f".{final.name}.{broadcast_from_main(uuid.uuid4().hex[:8])}.tmp")
    return hidden, _on_main(lambda: _place(checkpoint, hidden, paths)) or _damage(hidden, step)


def _on_main(action: Callable[[], T]) -> T:
    """Return, on every rank, the result of a long ``action`` on rank 0, synchronizing often. Collective."""
    if dist.get_world_size() == 1:
        return action()
    with ThreadPoolExecutor(1, thread_name_prefix="fork") as pool:
        future = pool.submit(action) if is_main() else None
        while not broadcast_from_main(_is_done(future) if future else None):
            pass
        return on_all_ranks(lambda: future.result() if future else None)[0]  # type: ignore[return-value]


def _is_done(future: Future[T]) -> bool:
    wait_for([future], timeout=_MEET_S)
    return future.done()


def _place(checkpoint: Path, hidden: Path, paths: RunPaths) -> str | None:
    """Link or copy the files of ``checkpoint`` durably into ``hidden``; return why that failed, or None."""
    clear_leftovers(paths)
    files, problem = manifest_of(checkpoint)
    if problem is not None:
        return problem
    try:
        with writing("the checkpoint of a fork", hidden):
            for name in files:
                (hidden / name).parent.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(READERS, thread_name_prefix="fork") as pool:
                list(
                    pool.map(
                        lambda name: _link(file_below(checkpoint, name), hidden / name), [*files, MANIFEST]
                    )
                )
            for folder in {(hidden / name).parent for name in files}:
                sync_folder(folder)
    except (FileNotFoundError, CheckpointError) as error:
        remove_folder(hidden)
        return str(error) if checkpoint.exists() else "its run has deleted it"
    except BaseException:
        remove_folder(hidden, ignore_errors=True)  # otherwise a full disk stays full
        raise
    return None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(source, target)
        sync_file(target)


def _damage(folder: Path, step: int) -> str | None:
    """Return the damage of a copied checkpoint and delete its folder; None if it is intact. Collective."""
    try:
        read_checkpoint(folder, (step, 0))
    except CheckpointError as error:
        dist.barrier()  # before rank 0 removes the folder, no rank may still read it
        if is_main():
            remove_folder(folder)
        return str(error)
    return None


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
        write_fork(paths, fork)
        hidden.rename(final)
        sync_folder(final.parent)
    later = [moment for moment, _ in step_entries(source.paths.checkpoints) if moment > (step, 0)]
    left = f" (its newest lies within step {max(later)[0] + 1})" if later and source.step is None else ""
    print(f"{paths.root}: forked from {fork.origin}{left}", flush=True)
