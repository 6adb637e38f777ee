"""``bapo rehearse``: dry run of a recipe's real program, which shows whether it runs and fits.

The command needs neither a GPU nor weights: child processes run the ranks on fake tensors, which have shapes
and no data. Raises ConfigError for a recipe that cannot be rehearsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from bapo_megatron.commands.plan import sound_job
from bapo_megatron.commands.recipe_flags import check_names, recipe_command
from bapo_megatron.config import RunConfig
from bapo_megatron.planning.job import PlanOptions, shape_folder
from bapo_megatron.runtime.files import write_atomically
from bapo_rehearsal.job import RehearseOptions, one_of_each_stage, rehearse_job
from bapo_rehearsal.results import collective_mismatches, rehearsal_dict, rehearsal_text


@dataclass(frozen=True)
class RehearseCommand:
    """Flags of ``bapo rehearse``: the recipe's and its own, without a prefix."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    options: Annotated[RehearseOptions, tyro.conf.arg(name="")] = field(default_factory=RehearseOptions)


def rehearse_command(arguments: Sequence[str]) -> int:
    """Rehearse the chosen ranks, print a page, write the JSON. Return 1 if a rank fails or does not fit."""
    recipe, command = recipe_command("rehearse", RehearseCommand, arguments)
    run, options = command.run, command.options
    options.check()
    run.check()
    check_names(run, own_code=True)
    plan_options = PlanOptions(
        gpu=options.gpu,
        memory_fraction=options.memory_fraction,
        expert_imbalance=options.expert_imbalance,
        expert_routes=options.expert_routes,
    )
    job = sound_job(run, recipe, plan_options)
    results = rehearse_job(job, shape_folder(recipe, run.model.hf_path), options)
    notes = collective_mismatches(results) if options.all_ranks else []
    shown = one_of_each_stage(results) if options.all_ranks else results
    print(rehearsal_text(shown, job, notes), end="")
    summary = rehearsal_dict(results, job, notes)
    if options.json is not None:
        write_atomically(options.json, json.dumps(summary, indent=1))
    return 0 if summary["fits"] else 1
