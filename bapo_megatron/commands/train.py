"""``bapo train RECIPE [flags]``: run or continue a recipe, in the processes that its layout needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bapo_megatron.cli import quiet
from bapo_megatron.commands.recipe_flags import recipe_config

if TYPE_CHECKING:
    from bapo_megatron.config import RunConfig


def train_command(arguments: Sequence[str]) -> None:
    """Check the run, then train: as this rank of a launcher, or in processes that this one starts."""
    from bapo_megatron.checkpoint.run_directory import check_writable
    from bapo_megatron.config import RunConfig
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes
    from bapo_megatron.trainer.preflight import check_run

    config = recipe_config("train", RunConfig, arguments)
    launched = launched_world_size()
    first = launched is None or os.environ["RANK"] == "0"
    data = data_parallel_size(config.parallel, launched)
    check_run(config, read_dataset=first)
    check_writable(config.directory)
    if launched is not None:
        train_process(config)
    else:
        run_processes(train_process, (config,), data * config.parallel.model_size)


def train_process(config: RunConfig) -> None:
    """One rank of a training run, from its process group to its end."""
    from contextlib import nullcontext

    from bapo_megatron.checkpoint.run_directory import only_writer
    from bapo_megatron.commands.finish import finish
    from bapo_megatron.policy.layout import parallel_processes
    from bapo_megatron.runtime.distributed import is_main
    from bapo_megatron.runtime.out_of_memory import naming_memory
    from bapo_megatron.runtime.preemption import PreemptionSignal
    from bapo_megatron.runtime.storage import writing
    from bapo_megatron.train import train
    from bapo_megatron.trainer.build import open_run

    quiet()
    preemption = PreemptionSignal()
    with (
        preemption.heeding(),
        naming_memory(),
        writing("a file of the run, or its output,", config.directory),
        parallel_processes(config.parallel),
        only_writer(config.directory) if is_main() else nullcontext(),
        open_run(config, preemption) as run,
    ):
        train(run)
        finish(run)
