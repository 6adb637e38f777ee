"""``bapo rehearse RECIPE [flags]``: a dry run of the recipe's real program on fake tensors, rank by rank.

Fake tensors have shapes and no data, so neither GPUs nor weights are needed. Each rank runs in a child
process, some at a time. ConfigError for a recipe that cannot be rehearsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from bapo_megatron.commands.recipe_flags import check_names, parse_flags, recipe_path
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.advice import problems
from bapo_megatron.planning.job import Job, PlanOptions, find_shape, shape_folder
from bapo_megatron.planning.rehearsal.job import RehearseOptions, one_of_each_stage, rehearse_job
from bapo_megatron.planning.rehearsal.results import collective_mismatches, rehearsal_dict, rehearsal_text


@dataclass(frozen=True)
class RehearseCommand:
    """All flags of ``bapo rehearse``: those of the recipe and its own, without a prefix."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    options: Annotated[RehearseOptions, tyro.conf.arg(name="")] = field(default_factory=RehearseOptions)


def rehearse_command(arguments: Sequence[str]) -> int:
    """Print the page of the rehearsal. Exit code 1 if a rank fails or does not fit, else 0."""
    recipe = recipe_path("rehearse", arguments)
    command = parse_flags("rehearse", recipe, RehearseCommand(load_recipe(recipe, RunConfig)), arguments)
    return rehearse_recipe(recipe, command.run, command.options)


def rehearse_recipe(recipe: Path, run: RunConfig, options: RehearseOptions) -> int:
    """Rehearse the chosen ranks, print the page, write the JSON; the exit code."""
    options.check()
    run.check()
    check_names(run)
    plan_options = PlanOptions(
        gpu=options.gpu,
        memory_fraction=options.memory_fraction,
        expert_imbalance=options.expert_imbalance,
        expert_routes=options.expert_routes,
    )
    job = Job(run, find_shape(recipe, run.model.hf_path), plan_options)
    if found := problems(job):
        raise ConfigError("\n".join(found))
    results = rehearse_job(job, shape_folder(recipe, run.model.hf_path), options)
    notes = collective_mismatches(results) if options.all_ranks else []
    shown = results if not options.all_ranks else one_of_each_stage(results)
    print(rehearsal_text(shown, job, notes), end="")
    summary = rehearsal_dict(results, job, notes)
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1))
    return 0 if summary["fits"] else 1
