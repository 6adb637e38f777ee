"""``bapo train RECIPE [flags]``: run or continue a recipe, in the processes that its layout needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from bapo_megatron.cli import quiet

if TYPE_CHECKING:
    from bapo_megatron.checkpoint.fork_record import ForkSource
    from bapo_megatron.config import RunConfig
    from bapo_megatron.runtime.preemption import PreemptionSignal


def train_command(arguments: Sequence[str]) -> int | None:
    """Check the run, then train, or with ``--rollout-only`` sample: as this rank of a launcher, or in
    processes that this one starts. The exit code; None for 0.

    A signal to stop before the run has begun ends it with 85: loading and checking may take minutes.
    """
    from bapo_megatron.runtime.stop_signals import handling, stop_at_once

    with handling(stop_at_once):
        return _train(arguments)


def _train(arguments: Sequence[str]) -> int | None:
    from bapo_megatron.checkpoint.run_directory import check_writable
    from bapo_megatron.commands.train_flags import train_flags
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes
    from bapo_megatron.trainer.preflight import check_rollout_only, check_run

    process: Callable[..., None]
    config, samples_only, fork = train_flags("train", arguments)
    launched = launched_world_size()
    first = launched is None or os.environ["RANK"] == "0"
    if samples_only:
        processes, process = 1, rollout_only_process
        check_rollout_only(config, read_dataset=first)
    else:
        processes = data_parallel_size(config.parallel, launched) * config.parallel.model_size
        process = partial(train_process, fork=fork)
        check_run(config, read_dataset=first, fork=fork)
    check_writable(config.directory)
    try:
        if launched is not None:
            process(config)
        else:
            run_processes(process, (config,), processes, heeding=True)
    except KeyboardInterrupt:
        if not samples_only:
            raise
        print("\nstopped; the same command goes on after the steps that are sampled", file=sys.stderr)
        return 130
    return None


def train_process(config: RunConfig, fork: ForkSource | None = None) -> None:
    """One rank of a training run, from its process group to its end. ``fork``: where a new one begins."""
    from bapo_megatron.checkpoint.fork import make_fork
    from bapo_megatron.commands.finish import finish
    from bapo_megatron.policy.layout import parallel_processes
    from bapo_megatron.train import train
    from bapo_megatron.trainer.build import open_run
    from bapo_megatron.trainer.threads import pin_threads

    with (
        _heeding(config) as preemption,
        parallel_processes(config.parallel),
        _only_writer(config),
    ):
        if fork is not None:
            make_fork(config, fork)
        config, kept = pin_threads(config)
        with open_run(config, preemption) as run:
            if kept and run.recorder:
                run.recorder.event(kept)
            train(run)
            finish(run)


def rollout_only_process(config: RunConfig) -> None:
    """One rank of a run with ``--rollout-only``. Those that a launcher has started beside rank 0 wait."""
    from bapo_megatron.runtime.distributed import process_group
    from bapo_megatron.trainer.rollout_only import sample_steps
    from bapo_megatron.trainer.threads import pin_threads

    with (
        _heeding(config) as preemption,
        process_group("gloo", config.parallel.timeout_minutes),
        _only_writer(config),
    ):
        config, kept = pin_threads(config)
        sample_steps(config, preemption, kept)


@contextmanager
def _heeding(config: RunConfig) -> Iterator[PreemptionSignal]:
    """The signals that ask this process to stop; errors of memory and storage are named within the block."""
    from bapo_megatron.runtime.out_of_memory import naming_memory
    from bapo_megatron.runtime.preemption import PreemptionSignal
    from bapo_megatron.runtime.storage import writing

    quiet()
    preemption = PreemptionSignal()
    written = writing("a file of the run, or its output,", config.directory)
    with preemption.heeding(), naming_memory(), written:
        yield preemption


@contextmanager
def _only_writer(config: RunConfig) -> Iterator[None]:
    """The lock of the run directory, which rank 0 holds. RunStopped if the directory is removed meanwhile."""
    from contextlib import nullcontext

    from bapo_megatron.checkpoint.run_directory import only_writer
    from bapo_megatron.errors import ConfigError, Preempted, RunStopped
    from bapo_megatron.runtime.distributed import is_main

    with only_writer(config.directory) if is_main() else nullcontext():
        try:
            yield
        except (ConfigError, Preempted):
            raise
        except Exception as error:  # whatever needed a file first
            if config.directory.exists():
                raise
            raise RunStopped(
                f"the run directory {config.directory} was removed or moved while the run used it ({error}); "
                f"put it back, or the run begins anew"
            ) from error
