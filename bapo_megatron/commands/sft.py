"""``bapo sft RECIPE [flags]``: a supervised warm start (fine-tuning), written as a Hugging Face folder.

It saves nothing before its end: one that is killed begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bapo_megatron.commands.recipe_flags import recipe_config
from bapo_megatron.runtime.device import silence_libraries

if TYPE_CHECKING:
    from bapo_megatron.config import SftConfig


def sft_command(arguments: Sequence[str]) -> None:
    """Check the configuration, then train: as this rank under a launcher, else in ranks that it starts."""
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
    """Entry point of one SFT rank: process group, training, export of the model."""
    from bapo_megatron.policy.layout import parallel_processes
    from bapo_megatron.runtime.storage import writing
    from bapo_megatron.trainer.sft import run_sft

    silence_libraries()
    with writing("the model", config.output), parallel_processes(config.parallel):
        run_sft(config)
