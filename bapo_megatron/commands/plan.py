"""``bapo plan`` and ``bapo rehearse``: does a recipe fit, by arithmetic, or by a dry run of its program.

Neither needs a GPU or weights: the plan reads the recipe and the model's config.json; the rehearsal runs the
ranks in child processes, some at a time, on fake tensors, which have shapes and no data. ConfigError for a
recipe that cannot be planned or rehearsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from bapo_megatron.commands.recipe_flags import check_names, recipe_command
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.advice import fastest_layouts, problems, smallest_changes
from bapo_megatron.planning.job import Job, PlanOptions, find_shape, shape_folder
from bapo_megatron.planning.page import plan_dict, plan_text
from bapo_megatron.planning.plan import make_plan
from bapo_megatron.planning.rehearsal.job import RehearseOptions, one_of_each_stage, rehearse_job
from bapo_megatron.planning.rehearsal.results import (
    collective_mismatches,
    rehearsal_dict,
    rehearsal_text,
)


@dataclass(frozen=True)
class PlanCommand:
    """All flags of ``bapo plan``: those of the recipe and its own, without a prefix."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    options: Annotated[PlanOptions, tyro.conf.arg(name="")] = field(default_factory=PlanOptions)


def plan_command(arguments: Sequence[str]) -> int:
    """Print the plan of the recipe. Exit code 1 if it does not fit, else 0."""
    recipe, command = recipe_command("plan", PlanCommand, arguments)
    command.options.check()
    job = _sound_job(command.run, recipe, command.options)
    check_names(command.run, own_code=True)
    plan = make_plan(job)
    advice = smallest_changes(plan) if plan.verdict.memory else []
    if command.options.as_json:
        print(json.dumps({**plan_dict(plan), "advice": [vars(change) for change in advice]}, indent=2))
    else:
        print(plan_text(plan, advice, fastest_layouts(plan, command.options.compare)), end="")
    return 0 if plan.verdict.fits else 1


@dataclass(frozen=True)
class RehearseCommand:
    """All flags of ``bapo rehearse``: those of the recipe and its own, without a prefix."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    options: Annotated[RehearseOptions, tyro.conf.arg(name="")] = field(default_factory=RehearseOptions)


def rehearse_command(arguments: Sequence[str]) -> int:
    """Rehearse the chosen ranks, print the page, write the JSON. Exit code 1 if one fails or does not fit."""
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
    job = _sound_job(run, recipe, plan_options)
    results = rehearse_job(job, shape_folder(recipe, run.model.hf_path), options)
    notes = collective_mismatches(results) if options.all_ranks else []
    shown = one_of_each_stage(results) if options.all_ranks else results
    print(rehearsal_text(shown, job, notes), end="")
    summary = rehearsal_dict(results, job, notes)
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1))
    return 0 if summary["fits"] else 1


def _sound_job(run: RunConfig, recipe: Path, options: PlanOptions) -> Job:
    job = Job(run, find_shape(recipe, run.model.hf_path), options)
    if found := problems(job):
        raise ConfigError("\n".join(found))
    return job
