"""Start of a run from its newest intact checkpoint: resume point, check of the restored state, CPU threads.

Order at a start, on every rank: ``read_begun`` reads what earlier starts left; ``pin_threads`` sets the CPU
threads before any computation, because they split long sums, which a resume at the same layout must repeat
bit for bit (results on GPUs do not depend on them); ``find_resume_point`` returns a ``ResumePoint`` before
anything is loaded; ``check_restored`` raises ResumeError if the loaded state differs from the saved one. All
are collective.
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
from bapo_megatron.checkpoint.resume_check import fingerprint_differences, state_fingerprint
from bapo_megatron.checkpoint.run_directory import (
    THREADS,
    Change,
    changed_settings,
    check_partial_step,
    read_config,
)
from bapo_megatron.checkpoint.store import clear_leftovers
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ResumeError
from bapo_megatron.interfaces import Policy, Sampler
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.rollout.sampler.events import FORKED
from bapo_megatron.runtime.distributed import broadcast_from_main, is_main
from bapo_megatron.trainer.records.metrics_log import evaluation_means
from bapo_megatron.types import Metrics


class PartialStep(NamedTuple):
    """A step that was stopped after some of its updates, with their metrics; a resumed run skips them."""

    version: int
    """Policy version at the start of the step."""
    updates: list[Metrics]
    """Metrics of the finished updates."""


@dataclass(frozen=True)
class ResumePoint:
    """Point where a run begins or continues: checkpoint (not loaded yet), first step, changed settings. Equal
    on all ranks."""

    checkpoint: Checkpoint | None
    """Checkpoint to continue from; None for a new run."""
    first_step: int
    """Next step to train: 1 for a new run."""
    partial_step: PartialStep | None
    """Updates of the first step that the checkpoint contains; None if it is between steps."""
    has_work: bool
    """Whether steps, or the evaluation of the last step, are left."""
    changed: list[Change]
    """Settings that differ from the stored ones."""
    fork: Fork | None = None
    """Fork record, if the checkpoint is the one that the fork begins at; otherwise None."""

    def clipping_state(self, config: RunConfig) -> Any:
        """Return the ``UpdateLoss`` state to restore; None if a fork changes the algorithm."""
        assert self.checkpoint is not None
        if self.fork and changes_algorithm(config, self.fork):
            return None
        return self.checkpoint.trainer["clipping"]

    def sampler_state(self, config: RunConfig) -> dict[str, Any] | None:
        """Return the sampler state to restore; None for a new run."""
        if self.checkpoint is None:
            return None
        state: dict[str, Any] = self.checkpoint.trainer["sampler"]
        return state if self.fork is None else {**state, FORKED: changed_data(config, self.fork)}


class Begun(NamedTuple):
    """Record of earlier starts in a run directory: settings of the last start, and fork record, if any."""

    settings: dict[str, Any] | None
    """Settings of the last start, by dotted names; None before the first."""
    fork: Fork | None
    """The run's fork record; None if it is not a fork."""

    @property
    def continued(self) -> dict[str, Any]:
        """Settings that a start continues from; before a fork's first start, its origin's settings."""
        return self.settings or (self.fork.settings if self.fork else {})


def read_begun(directory: Path) -> Begun:
    """Return the records of earlier starts in the run directory, equal on every rank. Collective."""
    return broadcast_from_main(Begun(read_config(directory), read_fork(directory)) if is_main() else None)


def find_resume_point(config: RunConfig, begun: Begun) -> ResumePoint:
    """Return the resume point of ``config.directory``: its newest intact checkpoint. Collective. Reads every
    byte of the checkpoint and deletes leftovers of a killed save. Raises CheckpointError if checkpoints exist
    but none is intact; ConfigError if a partly trained step would finish with other settings."""
    # Before the search, because half-written and half-deleted checkpoints are not candidates.
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
    """Resume check: raise ResumeError, on every rank, if the restored state differs from the saved one.
    Collective.

    Returns the events to record: damaged newer checkpoints, accepted differences
    (``config.accept_resume_mismatch``). ``sampler``: None except on rank 0. ``fork``: begins at the
    checkpoint; parts that its settings affect may differ.
    """
    stored = saved.trainer["certificate"]
    present = broadcast_from_main(sampler.state() if sampler else None)
    current = state_fingerprint(config, policy, present)
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
    if "state" not in stored:
        message = "written by an earlier version: weights and optimizer are not compared"
        events.append({"kind": "resume_check", "checkpoint": saved.path.name, "message": message})
    if names:
        events.append(
            {
                "kind": "resume_mismatch_accepted",
                "checkpoint": saved.path.name,
                "differences": differences,
            }
        )
    return events


def _lacks_last_evaluation(config: RunConfig, latest: Checkpoint | None) -> bool:
    last = config.steps
    if not latest or latest.moment != (last, 0) or not config.evaluates(last):
        return False
    return last not in evaluation_means(config.directory)


def pin_threads(config: RunConfig, begun: Begun) -> tuple[RunConfig, dict[str, Any] | None]:
    """Set this rank's CPU threads: from ``config``, else the run directory, else torch; on a GPU only from
    ``config``. Return ``config`` with their number, and an event to record (also printed) if the run
    directory's number replaced the environment's. Collective."""
    present = broadcast_from_main(torch.get_num_threads())
    threads = config.threads or begun.continued.get(THREADS) or present
    if config.threads is None and has_cuda():
        return config, None
    torch.set_num_threads(threads)
    pinned = replace(config, threads=threads)
    if config.threads is not None or threads == present:
        return pinned, None
    message = (
        f"{threads} threads a rank, as when the run began, and not {present}: its sums would differ in their "
        f"last bits (--threads {present} --allow-change {THREADS} takes {present})"
    )
    if is_main():
        print(message, flush=True)
    return pinned, {"kind": "threads_kept", "threads": threads, "environment": present, "message": message}
