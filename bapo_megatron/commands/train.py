"""``bapo train RECIPE [flags]``: start or resume a run, and the entry points of its ranks.

``train_command`` checks everything before a process group exists, then runs as one rank under a launcher, or
starts the layout's processes. The same command continues a run. Preempted and RunStopped propagate to
``cli.py``. Used by ``benchmarks/study/forked_sampler.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from bapo_megatron.runtime.device import silence_libraries

if TYPE_CHECKING:
    from bapo_megatron.checkpoint.fork_record import ForkSource
    from bapo_megatron.config import RunConfig
    from bapo_megatron.runtime.preemption import PreemptionSignal


def train_command(arguments: Sequence[str]) -> int | None:
    """Check the run, then train, or sample with ``--rollout-only``; the exit code, None for 0.

    Runs as one rank under a launcher; otherwise starts the layout's ranks itself and waits for them.
    """
    from bapo_megatron.runtime.stop_signals import handling, stop_at_once

    # Before torch is imported: loading and checking take minutes, and a stop signal then must end with 85.
    with handling(stop_at_once):
        return _train(arguments)


def _train(arguments: Sequence[str]) -> int | None:
    from bapo_megatron.commands.train_flags import train_flags

    config, samples_only, fork = train_flags("train", arguments)

    # After the flags: torch and megatron take seconds, and a wrong flag or --help needs neither.
    from bapo_megatron.checkpoint.run_directory import check_writable
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes
    from bapo_megatron.trainer.preflight import check_rollout_only, check_run

    process: Callable[..., None]
    launched = launched_world_size()
    first = launched is None or os.environ["RANK"] == "0"
    if samples_only:
        processes, process = 1, rollout_only_process
        check_rollout_only(config, read_dataset=first)
    else:
        processes = data_parallel_size(config.parallel, launched) * config.parallel.model_size
        process = partial(train_process, fork=fork)
        check_run(config, read_dataset=first, fork=fork)
    # Last: it makes the run directory, which a refused configuration must not leave behind.
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
    """Entry point of one training rank: process group, run directory's lock, training loop, export.

    ``fork``: the checkpoint of another run that a new run begins at.
    """
    from bapo_megatron.checkpoint.fork import make_fork
    from bapo_megatron.commands.finish import finish
    from bapo_megatron.policy.layout import parallel_processes
    from bapo_megatron.train import train
    from bapo_megatron.trainer.build import open_run
    from bapo_megatron.trainer.threads import pin_threads

    # Stop signals first: one that comes while process groups are made must not kill a single rank. The lock
    # after them: the process group says which rank holds it.
    with (
        _process_guards(config) as preemption,
        parallel_processes(config.parallel),
        _run_lock(config),
    ):
        if fork is not None:
            make_fork(config, fork)  # under the lock, and before the run reads its directory
        config, kept = pin_threads(config)  # before any kernel: the thread count decides how sums round
        with open_run(config, preemption) as run:
            if kept and run.recorder:
                run.recorder.event(kept)
            train(run)
            finish(run)


def rollout_only_process(config: RunConfig) -> None:
    """Entry point of one rank of ``--rollout-only``. Rank 0 samples; ranks of a launcher beside it wait."""
    from bapo_megatron.runtime.distributed import process_group
    from bapo_megatron.trainer.rollout_only import sample_steps
    from bapo_megatron.trainer.threads import pin_threads

    with (
        _process_guards(config) as preemption,
        process_group("gloo", config.parallel.timeout_minutes),
        _run_lock(config),
    ):
        config, kept = pin_threads(config)
        sample_steps(config, preemption, kept)


@contextmanager
def _process_guards(config: RunConfig) -> Iterator[PreemptionSignal]:
    """Guards of a run's process: stop signals, and readable errors for lack of memory and for disk errors."""
    from bapo_megatron.runtime.out_of_memory import naming_memory
    from bapo_megatron.runtime.preemption import PreemptionSignal
    from bapo_megatron.runtime.storage import writing

    silence_libraries()
    preemption = PreemptionSignal()
    written = writing("a file of the run, or its output,", config.directory)
    with preemption.heeding(), naming_memory(), written:
        yield preemption


@contextmanager
def _run_lock(config: RunConfig) -> Iterator[None]:
    """Lock of the run directory, held by rank 0. RunStopped if the directory is removed meanwhile."""
    from contextlib import nullcontext

    from bapo_megatron.checkpoint.run_directory import only_writer
    from bapo_megatron.errors import ConfigError, Preempted, RunStopped
    from bapo_megatron.runtime.distributed import is_main

    with only_writer(config.directory) if is_main() else nullcontext():
        try:
            yield
        except (ConfigError, Preempted):
            raise
        except Exception as error:  # the first access to a file of a removed directory raises anything
            if config.directory.exists():
                raise
            raise RunStopped(
                f"the run directory {config.directory} was removed or moved while the run used it ({error}); "
                f"put it back, or the run begins anew"
            ) from error
