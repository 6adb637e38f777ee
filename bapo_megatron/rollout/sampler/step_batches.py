"""Step files: writer, readers and recovery of one atomic .npz file per step, which holds its training batch.

    RUN/journal/step_000001.npz  step_000002.npz ...      step_000001.routes.npy ...

``write_step`` writes a ``StepBatch``, in the sampler process; ``read_header`` returns its header on trainer
rank 0; every rank reads its own samples (``step_columns.py``). A file has a JSON header, the prompts' ids,
and an array per response column (``types.RESPONSE_COLUMNS``), in numpy's zip format: bit-exact, with
checksums that reveal damage. Routes (each token's experts), thirty times larger than the rest, are in a
separate file (``data/routes.py``). ``ReplaySampler`` gives the trainer the step files of another run.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bapo_megatron.data.routes import read_routes, unknown_expert, write_routes
from bapo_megatron.errors import ConfigError, StorageFailed
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.sampler.events import batch_served
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.step_columns import PROMPTS, column_file, header_of
from bapo_megatron.rollout.sampler.write_ahead_log import Record
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths, step_entries, step_name
from bapo_megatron.runtime.storage import OldFiles, check_readable, writing
from bapo_megatron.types import (
    RESPONSE_COLUMNS,
    ColumnFile,
    FinishReason,
    Group,
    Prompt,
    ResponseTokens,
    Rollout,
    StepBatch,
    StepHeader,
    StoredRoutes,
)

_ROUTES, _LOST_ROUTES = ".routes.npy", ".routes.lost"  # suffixes of route files
_APART: dict[str, Any] = {name: None for name, column in RESPONSE_COLUMNS.items() if column.apart}
"""Columns stored in separate files, None in a step file."""


def step_path(directory: Path, step: int) -> Path:
    """Return the path of a step file."""
    return directory / f"{step_name(step)}.npz"


def write_step(directory: Path, step: int, batch: StepBatch, numbers: Sequence[int] = ()) -> Path:
    """Write the batch of ``step`` atomically and return its path; raises RunStopped if the disk fails."""
    content, path = io.BytesIO(), step_path(directory, step)
    with writing(f"the rollouts of step {step}", path):
        directory.mkdir(parents=True, exist_ok=True)
        # Routes first, because the step file, which holds their checksums, makes the step valid.
        about, crcs = _write_routes(directory, step, batch)
        np.savez(content, allow_pickle=False, **_arrays(batch, numbers, about), **crcs)
        write_atomically(path, content.getvalue())
    return path


def routes_path(directory: Path, step: int) -> Path:
    """Return the path of a step's route file."""
    return directory / f"{step_name(step)}{_ROUTES}"


def steps_in(directory: Path) -> list[int]:
    """Return the sorted steps in ``directory``; raises ConfigError or FailingDiskError if unreadable."""
    try:
        return sorted(step for (step, _), _ in step_entries(directory, ".npz"))
    except OSError as error:
        check_readable(error, "the list of rollouts", directory)
        raise


def step_groups(directory: Path, step: int) -> list[int]:
    """Return the group numbers of ``step``. Raises ConfigError as ``read_step`` does."""
    with _opened(directory, step) as (_, arrays):
        return list(json.loads(arrays["header"].tobytes()).get("numbers", []))


def read_step(directory: Path, step: int) -> StepBatch:
    """Return the batch of ``step``, with routes left in their file (``Rollout.stored_routes``). Raises
    ConfigError if the file is missing or damaged."""
    with _opened(directory, step) as (_, arrays):
        return _batch(dict(arrays), routes_path(directory, step).absolute())


def read_header(directory: Path, step: int) -> StepHeader:
    """Read the whole file of ``step``; return its header. Raises ConfigError if damaged or compressed."""
    return header_of(*_uncompressed(directory, step))


def read_example(directory: Path, step: int) -> tuple[np.ndarray, list[Rollout]]:
    """Return an example response of ``step`` for display: its prompt's ids and its branches. Picks the first
    episode with several branches, or the first response with given tokens, or the first one. Raises
    ConfigError as ``read_header`` does, and for a step without responses."""
    episodes: list[tuple[np.ndarray, list[Rollout]]] = []
    for group in _uncompressed(directory, step)[0].groups:
        for rollout in group.rollouts:
            if not rollout.branch:
                episodes.append((group.prompt.token_ids_P, []))
            episodes[-1][1].append(rollout)
    if not episodes:
        raise ConfigError(f"{step_path(directory, step)} has no responses: the step trained on nothing")

    def interest(episode: tuple[np.ndarray, list[Rollout]]) -> tuple[bool, bool]:
        mask_R = episode[1][0].loss_mask_R
        return len(episode[1]) > 1, mask_R is not None and not mask_R.all()

    return max(episodes, key=interest)


def _uncompressed(directory: Path, step: int) -> tuple[StepBatch, ColumnFile]:
    with _opened(directory, step) as (file, arrays):
        # First, to reject compressed files: ten megabytes may expand to ten gigabytes.
        columns = column_file(step_path(directory, step).absolute(), file, arrays.zip)
        return _batch(dict(arrays), routes_path(directory, step).absolute()), columns


@contextmanager
def _opened(directory: Path, step: int) -> Iterator[tuple[BinaryIO, Any]]:
    path = step_path(directory, step)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            yield file, arrays
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; step {step} was not recorded there") from error
    except Exception as error:  # a damaged zip file raises many error types
        check_readable(error, f"the rollouts of step {step}", path)
        raise ConfigError(f"{path}: the record of step {step} is damaged: {error!r}") from error


class StepFiles:
    """The step files in ``folder``, for the sampler: recovery at a start (``missing_records``), verification
    (``is_readable``) and deletion. Blocking.

    The first two rename a damaged file and all later ones to ``*.lost`` and report a run event. Raises
    ConfigError or FailingDiskError if the disk denies access or fails.
    """

    def __init__(self, folder: Path, report: Report) -> None:
        self._folder, self._report = folder, report
        self._old = OldFiles(report)

    def missing_records(self, sampler_state: SamplerState, first_step: int) -> list[Record]:
        """Return batch records that ``sampler_state`` lacks, rebuilt from the step files. A record is missing
        after damage or a kill between file and record. The file is authoritative for its groups. Steps before
        ``first_step`` were trained: the last gets an empty record if it has no other. Does not open the
        (many) files with logged records."""
        missing, served = [], sampler_state.served
        outstanding = {*sampler_state.open, *sampler_state.finished}
        unrecorded = sampler_state.unrecorded
        for step in (stored for stored in steps_in(self._folder) if stored > served or stored in unrecorded):
            try:
                numbers = step_groups(self._folder, step)
            except ConfigError as error:
                if step > served:
                    self._put_aside(step, error)
                    break
                continue
            if step > served or not outstanding.isdisjoint(numbers):
                missing.append(batch_served(step, numbers))
                served = max(served, step)
        if served < first_step - 1:
            missing.append(batch_served(first_step - 1, []))
        return missing

    def delete(self, last: int) -> None:
        """Delete the files of steps up to ``last``, including ``*.lost`` files."""
        for suffix in (".npz", ".lost", _ROUTES, _LOST_ROUTES):
            for (step, _), path in step_entries(self._folder, suffix):
                if step <= last:
                    with self._old.deleting(path):
                        path.unlink()

    def is_readable(self, step: int) -> bool:
        """Return whether the file of ``step`` is readable; if not, rename it and later ones to ``*.lost``."""
        try:
            for group in read_step(self._folder, step).groups:
                for rollout in group.rollouts:
                    if rollout.stored_routes is not None:
                        read_routes(rollout.stored_routes, wait_s=0.0)
        except (ConfigError, StorageFailed) as error:
            self._put_aside(step, error)
            return False
        return True

    def _put_aside(self, step: int, why: Exception) -> None:
        # A temporarily failing disk, such as an NFS server that is briefly down, may still have the file.
        check_readable(why, f"the rollouts of step {step}", step_path(self._folder, step))
        self._report("step_lost", step=step, detail=f"{why}; it is sampled anew")
        for later in steps_in(self._folder):
            if later >= step:
                path = step_path(self._folder, later)
                path.rename(path.with_suffix(".lost"))
                if (routes := routes_path(self._folder, later)).exists():
                    routes.rename(self._folder / f"{step_name(later)}{_LOST_ROUTES}")


class ReplaySampler:
    """The trainer's ``Sampler`` for a replay, without engines: ``next_batch`` returns the header of another
    run's stored batch (``config.rollout.replay``). Never waits. Raises ConfigError if there is no journal, or
    a step file is missing or damaged."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = RunPaths(run_dir).journal
        if not self._directory.is_dir():
            raise ConfigError(f"rollout.replay={run_dir}: no journal there; give the directory of a run")

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Do nothing: the step number identifies the file."""

    def next_batch(self, step: int, wait_s: float) -> StepHeader:
        return read_header(self._directory, step)

    def evaluated(self, step: int, wait_s: float) -> None:
        """Return None: a replay has no engines."""

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Do nothing: a replay samples nothing."""

    def state(self) -> dict[str, Any]:
        """Return an empty state: a replay continues by step number."""
        return {}

    def checkpointed(self, oldest: int) -> None:
        """Do nothing: the files belong to the other run."""

    def close(self) -> None:
        """Do nothing: there are no resources."""


def _write_routes(
    directory: Path, step: int, batch: StepBatch
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Write a step's routes; return their header and checksum arrays, both empty without routes."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    known = [rollout.routes_R for rollout in rollouts if rollout.routes_R is not None]
    if not known:
        return {}, {}
    row = known[0].shape[1:]
    parts = [
        np.full((len(item.token_ids_R), *row), unknown_expert(known[0].dtype), known[0].dtype)
        if item.routes_R is None
        else item.routes_R
        for item in rollouts
    ]
    crcs = write_routes(routes_path(directory, step), parts)
    about = {"routes": {"dtype": known[0].dtype.str, "layers": row[0], "per_token": row[1]}}
    return about, {"route_crcs": np.array(crcs, np.uint32)}


def _arrays(batch: StepBatch, numbers: Sequence[int], more: dict[str, Any]) -> dict[str, np.ndarray]:
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    groups = [_group_header(group) for group in batch.groups]
    header = {"metrics": batch.metrics, "numbers": list(numbers), "groups": groups, **more}
    prompt_ids = [np.zeros(0, np.int32), *(group.prompt.token_ids_P for group in batch.groups)]
    return {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        PROMPTS: np.concatenate(prompt_ids).astype(np.int32, casting="same_kind"),
        **ResponseTokens.joined([replace(rollout, **_APART) for rollout in rollouts]).arrays,
    }


def _group_header(group: Group) -> dict[str, Any]:
    prompt = {**dataclasses.asdict(group.prompt), "token_ids_P": len(group.prompt.token_ids_P)}
    for unneeded in ("opens_thinking", "reward", "messages", "turns"):  # the rewards are known
        del prompt[unneeded]
    named = [dict(r.named_rewards) for r in group.rollouts]
    rollouts = [_listed(rollout) for rollout in group.rollouts]
    return {"prompt": prompt, "rollouts": rollouts, **({"named_rewards": named} if any(named) else {})}


def _listed(rollout: Rollout) -> tuple[Any, ...]:
    """Return a rollout's header entry; branch fields come last, only for a branch other than the default."""
    entry = (len(rollout.token_ids_R), rollout.finish_reason, float(rollout.reward))
    return (*entry, rollout.branch, rollout.has_prompt) if rollout.branch or not rollout.has_prompt else entry


def _with_branch(listed: Sequence[Any]) -> tuple[int, FinishReason, float, int, bool]:
    length, reason, reward, branch, has_prompt = (*listed, 0, True)[:5]
    return length, reason, reward, branch, has_prompt


def _batch(arrays: dict[str, np.ndarray], routes: Path) -> StepBatch:
    header = json.loads(arrays["header"].tobytes())
    listed = [_with_branch(entry) for group in header["groups"] for entry in group["rollouts"]]
    tokens = ResponseTokens.split(arrays, (length for length, *_ in listed))
    stored = _stored_routes(routes, header.get("routes"), [entry[0] for entry in listed], arrays)
    named = [entry for group in header["groups"] for entry in _named_rewards(group)]
    rollouts = (
        Rollout(
            **example.columns,
            finish_reason=reason,
            reward=reward,
            stored_routes=where,
            named_rewards=each,
            branch=branch,
            has_prompt=own,
        )
        for example, (_, reason, reward, branch, own), where, each in zip(
            tokens, listed, stored, named, strict=True
        )
    )
    groups, at = [], 0
    for about in header["groups"]:
        length = about["prompt"].pop("token_ids_P")
        ids_P, at = arrays[PROMPTS][at : at + length].copy(), at + length
        prompt = Prompt(token_ids_P=ids_P, **about["prompt"])
        groups.append(Group(prompt, tuple(islice(rollouts, len(about["rollouts"])))))
    return StepBatch(tuple(groups), header["metrics"])


def _named_rewards(group: dict[str, Any]) -> list[dict[str, float]]:
    return group.get("named_rewards") or [{}] * len(group["rollouts"])


def _stored_routes(
    file: Path, about: dict[str, Any] | None, lengths: Sequence[int], arrays: dict[str, np.ndarray]
) -> Iterator[StoredRoutes | None]:
    """Yield the location of each response's routes; None for each if the step has none."""
    if about is None:
        yield from [None] * len(lengths)
        return
    first = 0
    for length, crc in zip(lengths, arrays["route_crcs"].tolist(), strict=True):
        yield StoredRoutes(file, first, length, about["layers"], about["per_token"], about["dtype"], crc)
        first += length
