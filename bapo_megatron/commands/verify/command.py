"""``bapo verify-parallel RECIPE [flags]``: writes or compares a layout reference, in the layout's processes.

Without ``--save`` and ``--certificate`` it measures the layout of ``--reference.*`` first (by default one
process), then the recipe's, each in new processes, and compares them. Under a launcher it runs in the
launcher's processes, and needs one of the two flags. Exit code 1 if the layouts differ.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.commands.recipe_flags import parse_flags, recipe_path
from bapo_megatron.runtime.device import silence_libraries

if TYPE_CHECKING:
    from bapo_megatron.commands.verify.check import VerifyConfig


def verify_command(arguments: Sequence[str]) -> None:
    """Check the layout, in as many processes as it needs. SystemExit(1) if it differs from the reference."""
    from bapo_megatron.commands.verify.check import VerifyConfig, check_verify
    from bapo_megatron.config import RunConfig
    from bapo_megatron.config.recipe import load_recipe
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes

    recipe = recipe_path("verify-parallel", arguments)
    default = VerifyConfig.of(load_recipe(recipe, RunConfig))
    config = parse_flags("verify-parallel", recipe, default, arguments)
    launched = launched_world_size()
    processes = data_parallel_size(config.parallel, launched) * config.parallel.model_size
    check_verify(config, launched is not None)
    if launched is not None:
        verify_process(config)
    elif config.runs_reference:
        _run_both_layouts(config, processes)
    else:
        run_processes(verify_process, (config,), processes, apart=True)


def _run_both_layouts(config: VerifyConfig, processes: int) -> None:
    """Measure the reference layout, then the recipe's layout in new processes, and compare them."""
    from bapo_megatron.runtime.distributed import run_processes

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference.npz"
        reference = dataclasses.replace(config, parallel=config.reference, save=path)
        count = config.reference.model_size * (config.reference.data or 1)
        print(f"the reference, in {count} process(es), then the recipe's layout, in {processes}", flush=True)
        run_processes(verify_process, (reference,), count, apart=True)
        compared = dataclasses.replace(config, certificate=path)
        run_processes(verify_process, (compared,), processes, apart=True)


def verify_process(config: VerifyConfig) -> None:
    """One rank of a layout's check. SystemExit(1), on every rank, if the layout differs."""
    from bapo_megatron.commands.verify.check import verify_layout
    from bapo_megatron.policy.layout import parallel_processes

    silence_libraries()
    with parallel_processes(config.parallel):
        code = verify_layout(config)
    if code:
        sys.exit(code)
