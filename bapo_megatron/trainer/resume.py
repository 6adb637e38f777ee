"""The resume point of a run: its newest whole checkpoint, the steps left, the resume check, CPU threads.

At a start, on every rank. First ``pin_threads``, before any computation: threads split long sums between
them, so a run resumed at its layout keeps their number, for sums equal bit for bit. A GPU does not depend on
it. Then ``trainer/build.py`` calls ``find_resume_point`` before anything is loaded, and ``check_restored``,
if there is a checkpoint, once policy and sampler have their states. All three are collective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bapo_megatron.checkpoint.fork_record import (
    Fork,
    changed_data,
    changes_algorithm,
    may_differ,
    read_fork,
)
from bapo_megatron.checkpoint.reader import Checkpoint, latest_checkpoint
from bapo_megatron.checkpoint.resume_check import (
    fingerprint_differences,
    has_digests,
    state_fingerprint,
)
from bapo_megatron.checkpoint.run_directory import (
    THREADS,
    Change,
    changed_settings,
    check_partial_step,
    plain_values,
    read_config,
)
from bapo_megatron.checkpoint.store import clear_leftovers
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ResumeError
from bapo_megatron.interfaces import Policy, Sampler
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.rollout.sampler.events import FORKED
from bapo_megatron.runtime.distributed import broadcast_from_main, is_main, launched_world_size
from bapo_megatron.trainer.records.metrics_log import evaluation_means
from bapo_megatron.types import Metrics


class PartialStep(NamedTuple):
    """A partly trained step, as plain data: the updates that a checkpoint within it holds.

    Kept in that checkpoint; ``train.train_on`` makes it before it stops within a step, and continues after
    these updates.
    """

    version: int
    """The policy's version at the start of the step."""
    updates: list[Metrics]
    """The metrics of the updates that were made."""


@dataclass(frozen=True)
class ResumePoint:
    """The resume point: the checkpoint and step that a run begins or continues from. Equal on every rank.

    Plain data: nothing is loaded yet. The methods pick the states of the loop's parts from the checkpoint.
    """

    checkpoint: Checkpoint | None
    """The checkpoint to continue from; None for a new run."""
    first_step: int
    """The step to train next: 1 for a new run."""
    partial_step: PartialStep | None
    """The part of the first step that the checkpoint holds; None if it was written between steps."""
    has_work: bool
    """Whether steps are left, or the evaluation of the last one."""
    changed: list[Change]
    """Settings that differ from those that the run was stored with."""
    fork: Fork | None = None
    """The fork that begins at the checkpoint; None for a checkpoint that the run has written itself."""

    def clipping_state(self, config: RunConfig) -> Any:
        """State of ``UpdateLoss`` to restore; None where a fork changes the algorithm."""
        assert self.checkpoint is not None
        if self.fork and changes_algorithm(config, self.fork):
            return None
        return self.checkpoint.trainer["clipping"]

    def sampler_state(self, config: RunConfig) -> dict[str, Any] | None:
        """State of the sampler to restore; None for a new run."""
        if self.checkpoint is None:
            return None
        state: dict[str, Any] = self.checkpoint.trainer["sampler"]
        return state if self.fork is None else {**state, FORKED: changed_data(config, self.fork)}


class Begun(NamedTuple):
    """What earlier starts of a run have stored, as plain data. Read once a start, under the lock."""

    settings: dict[str, Any] | None
    """The settings of the last start, by dotted names; None before the first."""
    fork: Fork | None
    """The fork that the run is; None if it is not one."""

    @property
    def continued(self) -> dict[str, Any]:
        """The settings that a start continues from; before a fork's first start those of its origin."""
        return self.settings or (self.fork.settings if self.fork else {})


def read_begun(directory: Path) -> Begun:
    """What earlier starts have stored in the run directory, equal on every rank. Collective."""
    return broadcast_from_main(Begun(read_config(directory), read_fork(directory)) if is_main() else None)


def find_resume_point(config: RunConfig, begun: Begun) -> ResumePoint:
    """The resume point of ``config.directory``, from its newest whole checkpoint. Collective.

    Reads every byte of the checkpoint, and deletes leftovers of a killed save. CheckpointError if there are
    checkpoints and none is whole; ConfigError if a partly trained step would be finished with other settings.
    """
    # Before the search: half-written and half-deleted checkpoints of a killed process are not candidates.
    if is_main():
        clear_leftovers(config.paths)
    latest = latest_checkpoint(config.paths)
    first_step = latest.step + 1 if latest else 1
    partial = PartialStep(*latest.trainer["within"]) if latest and latest.trainer["within"] else None
    has_work = first_step <= config.steps or broadcast_from_main(
        is_main() and _lacks_last_evaluation(config, latest)
    )
    changed, fork = changed_settings(config, begun.settings), begun.fork
    if partial:
        check_partial_step(changed, config)
    is_beginning = fork and latest and latest.moment == (fork.origin.step, 0)
    return ResumePoint(latest, first_step, partial, has_work, changed, fork if is_beginning else None)


def check_restored(
    config: RunConfig,
    policy: Policy,
    sampler: Sampler | None,
    saved: Checkpoint,
    fork: Fork | None = None,
) -> list[dict[str, Any]]:
    """Resume check: ResumeError, on every rank, if the restored state differs from the saved one. Collective.

    Returns the events to record: newer checkpoints that were passed over, accepted differences
    (``config.accept_resume_mismatch``), and a checkpoint of an earlier version that holds no digests.
    ``sampler`` is None on every rank but 0. ``fork``: the fork that begins at the checkpoint; what its
    settings change is not compared.
    """
    stored = saved.trainer["certificate"]
    present = broadcast_from_main(sampler.state() if sampler else None)
    current = state_fingerprint(config, policy, present, stored)
    differences = fingerprint_differences(config, stored, current)
    if fork:
        differences = {
            name: line for name, line in differences.items() if name not in may_differ(config, fork)
        }
    names = {f"{saved.path.name}:{name}": line for name, line in differences.items()}
    if refused := [name for name in names if name not in config.accept_resume_mismatch]:
        raise ResumeError(
            f"resume check of {saved.path} failed, the loaded state differs from the saved state:\n"
            + "\n".join(names[name] for name in refused)
            + "\nif you know why and want to train on the loaded state: --accept-resume-mismatch "
            + " ".join(names)
        )
    events: list[dict[str, Any]] = [
        {"kind": "checkpoint_damaged", "checkpoint": saved.path.name, "message": problem}
        for problem in saved.passed_over
    ]
    if names:
        events.append(
            {
                "kind": "resume_mismatch_accepted",
                "checkpoint": saved.path.name,
                "differences": differences,
            }
        )
    if not has_digests(stored):
        message = "written by an earlier version: weights and optimizer are not compared bit by bit"
        events.append({"kind": "resume_check", "checkpoint": saved.path.name, "message": message})
    return events


def _lacks_last_evaluation(config: RunConfig, latest: Checkpoint | None) -> bool:
    """Whether all steps are saved, but the last evaluation is missing."""
    last = config.steps
    if not latest or latest.moment != (last, 0) or not config.evaluates(last):
        return False
    return last not in evaluation_means(config.directory)


Event = dict[str, Any]

_LAYOUT = [f"parallel.{name}" for name in ("tensor", "pipeline", "virtual", "context", "sequence")]
_LAYOUT += ["parallel.pipeline_layers", "parallel.expert", "parallel.expert_tensor"]


def pin_threads(config: RunConfig, begun: Begun) -> tuple[RunConfig, Event | None]:
    """Set this rank's number of threads: that of ``config``, else the run directory's, else torch's.

    Returns ``config`` with it, and the event to record if the environment would have given another. On a GPU
    only a number in ``config`` is set. Collective.
    """
    asked, kept = config.threads, begun.continued.get(THREADS)
    present, is_other = broadcast_from_main(torch.get_num_threads()), _has_other_layout(config, begun)
    # Another layout adds in another order anyway, so it need not keep the number.
    threads = asked or (None if is_other else kept) or present
    if asked is None and has_cuda():
        return config, None
    torch.set_num_threads(threads)
    config = replace(config, threads=threads)
    if asked is not None or (kept or present) == present:
        return config, None
    if is_other:
        message = (
            f"{present} threads a rank, and not {kept} as when the run began: another layout adds in another "
            f"order anyhow (--threads {kept} --allow-change {THREADS} takes {kept})"
        )
        return config, _announced("threads_anew", threads, present, message)
    message = (
        f"{threads} threads a rank, as when the run began, and not {present}: its sums would differ in their "
        f"last bits (--threads {present} --allow-change {THREADS} takes {present})"
    )
    return config, _announced("threads_kept", threads, present, message)


def _announced(kind: str, threads: int, environment: int, message: str) -> Event:
    """The event of a choice of threads, which is also printed on rank 0."""
    if is_main():
        print(message, flush=True)
    return {"kind": kind, "threads": threads, "environment": environment, "message": message}


def _has_other_layout(config: RunConfig, begun: Begun) -> bool:
    """Whether the stored layout differs in a field that changes the order of sums."""
    stored, now, parallel = begun.continued, plain_values(config), config.parallel
    if any(stored.get(name, now[name]) != now[name] for name in _LAYOUT):
        return True
    data = stored.get("parallel.data")  # None: as many as were launched, which the directory does not say
    present = parallel.data or max(1, (launched_world_size() or 1) // parallel.model_size)
    return data is not None and data != present
