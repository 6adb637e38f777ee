"""``bapo train``, ``sft``, ``verify-parallel``, ``rollout-server``: commands and entry points of their ranks.

A ``*_command`` checks its recipe before any process group exists, then runs as one rank under a launcher or
starts the layout's processes (``rollout_server_command``: one server). A ``*_process`` is the entry point of
one rank. ``finish`` ends a run: export and summary. Repeating ``bapo train`` continues a run. Preempted and
RunStopped propagate to ``cli.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import sleep
from typing import TYPE_CHECKING

from bapo_megatron.commands.recipe_flags import recipe_command, recipe_config
from bapo_megatron.runtime.device import silence_libraries

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.checkpoint.fork_record import ForkSource
    from bapo_megatron.config import RunConfig, SftConfig
    from bapo_megatron.runtime.guards import PreemptionSignal
    from bapo_megatron.trainer.build import Run
    from bapo_megatron.trainer.records.recorder import Recorder

_POLL_S = 1.0


def train_command(arguments: Sequence[str]) -> int | None:
    """Check the run, then train, or sample with ``--rollout-only``. Returns the exit code; None means 0. Runs
    as one rank under a launcher; otherwise starts the layout's ranks and waits for them."""
    from bapo_megatron.runtime.exit_codes import handling, stop_at_once

    # Before importing torch: loading and checking take minutes, and a stop signal then must end with 85.
    with handling(stop_at_once):
        return _train(arguments)


def _train(arguments: Sequence[str]) -> int | None:
    from bapo_megatron.commands.train_flags import train_flags

    config, samples_only, fork = train_flags("train", arguments)

    # After the flags: torch and megatron take seconds, and a wrong flag or --help needs neither.
    from bapo_megatron.checkpoint.run_directory import check_writable
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes
    from bapo_megatron.trainer.preflight import check_run

    process: Callable[..., None]
    launched = launched_world_size()
    first = launched is None or os.environ["RANK"] == "0"
    if samples_only:
        processes, process = 1, rollout_only_process
        check_run(config, read_dataset=first, samples_only=True)
    else:
        processes = data_parallel_size(config.parallel, launched) * config.parallel.model_size
        process = partial(train_process, fork=fork)
        check_run(config, read_dataset=first, fork=fork)
        import bapo_megatron.train  # noqa: F401  # once for all ranks, where they are forked

    # Last: it creates the run directory, which a rejected configuration must not leave behind.
    check_writable(config.directory)
    try:
        if launched is not None:
            process(config)
        else:
            run_processes(process, (config,), processes, heeding=True)
    except KeyboardInterrupt:
        if not samples_only:
            raise
        print("\nstopped; the same command continues after the steps that are sampled", file=sys.stderr)
        return 130
    return None


def train_process(config: RunConfig, fork: ForkSource | None = None) -> None:
    """Entry point of one training rank: process group, run directory lock, training loop, export."""
    from bapo_megatron.checkpoint.fork import make_fork
    from bapo_megatron.policy.layout import parallel_processes
    from bapo_megatron.rollout.engines.backend import engine_backend
    from bapo_megatron.runtime.device import should_have_gpu
    from bapo_megatron.train import train
    from bapo_megatron.trainer.build import open_run
    from bapo_megatron.trainer.resume import pin_threads, read_begun

    if config.rollout.replay is None:  # a replay has no engines
        engine_backend(config.rollout.engine).prepare_process(config.rollout, should_have_gpu())
    # Stop signals first: one that arrives while process groups form must not kill a single rank. The lock
    # after them: the process group determines which rank holds it.
    with _process_guards(config) as preemption, parallel_processes(config.parallel), _run_lock(config):
        if fork is not None:
            make_fork(config, fork)  # under the lock, and before the run reads its directory
        begun = read_begun(config.directory)
        # Before any kernel: the thread count decides how sums round.
        config, kept = pin_threads(config, begun)
        with open_run(config, begun, preemption) as run:
            if kept and run.recorder:
                run.recorder.event(kept)
            train(run)
            finish(run)


def finish(run: Run) -> None:
    """Finish a run: export the policy unless already exported, print the summary, wait for running exports
    and ``checkpoint.after_export``. Collective, after the last step. Raises Preempted if the run is asked to
    stop before the exports are done."""
    from bapo_megatron.runtime.distributed import broadcast_from_main
    from bapo_megatron.trainer.flow_control import bring_policy_back

    bring_policy_back(run)  # after the last evaluation engines have the GPUs
    output = run.config.paths.export
    is_exported = broadcast_from_main(run.recorder is not None and run.recorder.is_exported(output))
    if not is_exported:
        _export(run, output)
    if run.recorder:
        _tell_summary(run, run.recorder, is_new=not is_exported)
    wait_for_exports(run)
    if run.exports:
        run.exports.finish(is_new=not is_exported)
    wait_for_exports(run)


def _export(run: Run, output: Path) -> None:
    """Write the final policy as a Hugging Face folder and record it. Collective."""
    from bapo_megatron.checkpoint.export import WRITER, export_hf
    from bapo_megatron.runtime.distributed import is_main
    from bapo_megatron.runtime.written_folders import move_foreign_aside

    if is_main() and (kept := move_foreign_aside(output, WRITER)):
        print(f"what was not an export of this version, or held other files, is kept as {kept}", flush=True)
    export_hf(run.policy.hf_weights(), run.config.model.hf_path, output)
    if run.recorder:
        run.recorder.export(run.config.steps, output)


def wait_for_exports(run: Run) -> None:
    """Wait for running exports, with their commands, then delete old checkpoints. Collective. Raises
    Preempted if the run is asked to stop meanwhile."""
    from bapo_megatron.runtime.distributed import broadcast_from_main
    from bapo_megatron.trainer.flow_control import stop_if_preempted

    if not broadcast_from_main(run.exports.is_busy() if run.exports else False):
        return
    if run.exports:
        print("waiting for exports", flush=True)
    while broadcast_from_main(run.exports.is_busy() if run.exports else False):
        stop_if_preempted(run, run.config.steps)
        sleep(_POLL_S)
        if run.exports:
            run.exports.poll()
    if run.exports:
        run.checkpoints.delete_old()  # exports read their checkpoints


def _tell_summary(run: Run, recorder: Recorder, is_new: bool) -> None:
    """Print the summary of a run. ``is_new``: it has just ended, so record an event if it made no update."""
    from bapo_megatron.commands.report.data import headline, read_metrics

    paths = run.config.paths
    metrics = read_metrics(paths.metrics)
    figures, updates = headline(metrics), metrics.known("policy/updates").sum()  # in a fork, its own
    first, last = (f"{figures[key] or 0.0:.2f}" for key in ("reward_first", "reward_last"))
    print(
        f"reward {first} -> {last} in {figures['steps']} steps, {updates:.0f} updates\n"
        f"Hugging Face model: {paths.export}\n"
        f"plots: bapo report {paths.root}",
        flush=True,
    )
    if is_new and not updates:
        recorder.no_updates()


def rollout_only_process(config: RunConfig) -> None:
    """Entry point of one ``--rollout-only`` rank. Rank 0 samples; a launcher's other ranks wait."""
    from bapo_megatron.runtime.distributed import process_group
    from bapo_megatron.trainer.resume import pin_threads, read_begun
    from bapo_megatron.trainer.rollout_only import sample_steps

    with (
        _process_guards(config) as preemption,
        process_group("gloo", config.parallel.timeout_minutes),
        _run_lock(config),
    ):
        config, kept = pin_threads(config, read_begun(config.directory))
        sample_steps(config, preemption, kept)


@contextmanager
def _process_guards(config: RunConfig) -> Iterator[PreemptionSignal]:
    """Guard a run's process: stop signals, and readable errors for out-of-memory and disk errors."""
    from bapo_megatron.runtime.guards import PreemptionSignal, naming_memory
    from bapo_megatron.runtime.storage import writing

    silence_libraries()
    preemption = PreemptionSignal()
    written = writing("a file of the run, or its output,", config.directory)
    with preemption.heeding(), naming_memory(), written:
        yield preemption


def _run_lock(config: RunConfig) -> AbstractContextManager[None]:
    from bapo_megatron.checkpoint.run_directory import only_writer
    from bapo_megatron.runtime.distributed import is_main

    return only_writer(config.directory) if is_main() else nullcontext()


# --- supervised fine-tuning ------------------------------------------------------------------------


def sft_command(arguments: Sequence[str]) -> None:
    """``bapo sft RECIPE [flags]``: a supervised warm start, written as a Hugging Face folder. Saves nothing
    before its end; if killed, it starts over."""
    from bapo_megatron.config import SftConfig

    config = recipe_config("sft", SftConfig, arguments)

    # After the flags: torch and megatron take seconds, and a wrong flag or --help needs neither.
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes
    from bapo_megatron.trainer.preflight import check_sft

    launched = launched_world_size()
    data = data_parallel_size(config.parallel, launched)
    check_sft(config)
    if launched is not None:
        sft_process(config)
    else:
        run_processes(sft_process, (config,), data * config.parallel.model_size)


def sft_process(config: SftConfig) -> None:
    """Entry point of one SFT rank: process group, training, model export."""
    from bapo_megatron.policy.layout import parallel_processes
    from bapo_megatron.runtime.storage import writing
    from bapo_megatron.trainer.sft import run_sft

    silence_libraries()
    with writing("the model", config.output), parallel_processes(config.parallel):
        run_sft(config)


# --- the check of a layout -------------------------------------------------------------------------


def verify_command(arguments: Sequence[str]) -> None:
    """``bapo verify-parallel RECIPE [flags]``. Raises SystemExit(1) if the layout fails the check."""
    from bapo_megatron.commands.verify_flags import VerifyConfig

    _, config = recipe_command("verify-parallel", VerifyConfig.of, arguments)

    from bapo_megatron.commands.verify import run_verify  # after the flags: torch and megatron take seconds

    run_verify(config)


# --- a server for the rollouts of a run ------------------------------------------------------------


def rollout_server_command(arguments: Sequence[str]) -> None:
    """``bapo rollout-server RECIPE [flags]``: run an SGLang server of the recipe's model until it ends. Runs
    use it through ``rollout.sglang.urls``; Slurm jobs start their servers with it."""
    from bapo_megatron.rollout.engines.sglang.server_process import ServeCommand, serve

    # A Slurm job passes the trainer's flags to its servers, which ignore --rollout-only and --fork.
    _, command = recipe_command("rollout-server", ServeCommand, list(_server_flags(arguments)))
    command.run.check()

    from bapo_megatron.policy.device import has_cuda  # after the flags: torch takes seconds

    serve(command, has_cuda())


def _server_flags(arguments: Sequence[str]) -> Iterator[str]:
    from bapo_megatron.commands.train_flags import TrainCommand
    from bapo_megatron.config.flags import in_tyros_form

    rest = iter(in_tyros_form(TrainCommand, arguments))
    for word in rest:
        if word == "--fork":
            next(rest, None)
        elif word not in ("--rollout-only", "--rollout_only") and not word.startswith("--fork="):
            yield word
