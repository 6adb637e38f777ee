"""Flags of ``bapo train`` and ``bapo submit`` besides the recipe's fields: modes and ``--fork``.

``train_flags`` parses a command line into a ``TrainRequest``, whose configuration has the mode's changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from bapo_megatron.checkpoint.fork_record import ForkSource
from bapo_megatron.checkpoint.run_directory import with_former_defaults
from bapo_megatron.commands.recipe_flags import recipe_command
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.run_paths import RunPaths, step_entries


@dataclass(frozen=True)
class TrainOptions:
    """Modes of ``bapo train``: sampling alone, training alone, or a fork of another run."""

    rollout_only: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Sample, judge and report the batches of all steps from the model's weights, with engines and without a
    trainer. Run directory: runs/NAME-rollout-only."""
    train_only: Annotated[tuple[Path, ...] | None, tyro.conf.arg(metavar="[RUN]")] = None
    """Train on the stored rollouts of RUN, a run or one with --rollout-only, without engines; without RUN on
    those of runs/NAME-rollout-only. Run directory: runs/NAME-train-only."""
    fork: Annotated[str | None, tyro.conf.arg(metavar="RUN[:STEP]")] = None
    """Begin a new run, in a new directory, at the checkpoint of STEP of RUN, or at its newest one: weights,
    optimizer and dataset position. All settings but the model's shape may differ. A directory that is this
    fork already is continued."""


@dataclass(frozen=True)
class TrainCommand:
    """All flags of ``bapo train``: those of the recipe and its own, without a prefix."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    options: Annotated[TrainOptions, tyro.conf.arg(name="")] = field(default_factory=TrainOptions)


class TrainRequest(NamedTuple):
    """Parsed ``bapo train`` command line: the configuration with the mode's changes, whether it only samples,
    and the checkpoint to fork from."""

    run: RunConfig
    samples_only: bool = False
    """Whether the run samples without a trainer (``--rollout-only``)."""
    fork: ForkSource | None = None
    """Checkpoint of another run from which this run starts."""


def train_flags(command: str, arguments: Sequence[str]) -> TrainRequest:
    """Return the parsed request; a run to resume keeps the defaults that it began with. Raises ConfigError
    for contradicting flags or a replay without rollouts."""
    _, parsed = recipe_command(command, TrainCommand, arguments)
    run, options = parsed.run, parsed.options
    if options.rollout_only and options.train_only is not None:
        raise ConfigError("--rollout-only and --train-only exclude each other: give one")
    if options.rollout_only:
        if options.fork is not None:
            raise ConfigError(
                "--rollout-only samples from the recipe's model, and --fork trains on: give one"
            )
        return TrainRequest(_continued(rollout_only_config(run)), samples_only=True)
    if options.train_only is not None:
        run = train_only_config(run, options.train_only)
    fork = None if options.fork is None else ForkSource.of(options.fork)
    return TrainRequest(_continued(run), fork=fork)


def _continued(run: RunConfig) -> RunConfig:
    """Return the run with the defaults that it began with, and print changed ones on the first rank."""
    run, lines = with_former_defaults(run)
    for line in lines if _speaks() else ():
        print(line, file=sys.stderr, flush=True)
    return run


def _speaks() -> bool:
    """Whether this process is alone or the launcher's first."""
    return (environment_variable("RANK") or environment_variable("SLURM_PROCID") or "0") == "0"


def rollout_only_config(run: RunConfig) -> RunConfig:
    """Return the configuration of a sampling-only run: its own directory, no evaluations, and ``steps`` may
    change on a resume. Raises ConfigError for a replay or a profile."""
    if run.rollout.replay is not None:
        raise ConfigError(
            f"--rollout-only samples, and rollout.replay={run.rollout.replay} gives stored rollouts instead: "
            f"leave one out"
        )
    if run.profile.steps:
        raise ConfigError("--rollout-only makes no updates, which profile.steps would trace: leave it out")
    return replace(
        run,
        run_dir=run.run_dir or _beside(run, "rollout-only"),
        rollout=run.rollout.without_trainer(),
        evaluation=replace(run.evaluation, every=0),
        checkpoint=replace(run.checkpoint, keep_best=0),
        allow_change=(*run.allow_change, "steps"),
    )


def train_only_config(run: RunConfig, named: Sequence[Path]) -> RunConfig:
    """Return the configuration of training on the rollouts of run ``named``, for at most their steps. Raises
    ConfigError if it has none."""
    if len(named) > 1:
        raise ConfigError(f"--train-only takes one run, not {' '.join(map(str, named))}")
    replayed = run.rollout.replay
    if named and replayed is not None and named[0].resolve() != replayed.resolve():
        raise ConfigError(f"--train-only {named[0]} and rollout.replay={replayed} name two runs: give one")
    source = named[0] if named else replayed or _beside(run, "rollout-only")
    stored = {step for (step, _), _ in step_entries(RunPaths(source).journal, ".npz")}
    steps = next(steps for steps in count() if steps + 1 not in stored)  # up to the first gap
    if steps == 0:
        raise ConfigError(
            f"--train-only: {source} holds no rollouts from step 1 on; sample some with `bapo train RECIPE "
            f"--rollout-only`, or name another run: --train-only RUN"
        )
    if steps < run.steps and _speaks():
        text = f"{source} holds the rollouts of {steps} steps: steps={steps} instead of {run.steps}"
        print(text, file=sys.stderr, flush=True)
    return replace(
        run,
        run_dir=run.run_dir or _beside(run, "train-only"),
        rollout=replace(run.rollout, replay=source),
        steps=min(steps, run.steps),
    )


def _beside(run: RunConfig, kind: str) -> Path:
    return Path("runs") / f"{run.name}-{kind}"
