"""``bapo plan``: whether a recipe fits in memory and how fast it runs, by arithmetic.

``plan_command`` prints the plan and returns the exit code: 0 if it fits, else 1. Needs neither a GPU nor
weights: runs the recipe, reads the model's config.json, and imports the recipe's custom code to check it.
Raises ConfigError for a recipe that cannot be planned.
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
from bapo_megatron.planning.job import Job, PlanOptions, find_shape
from bapo_megatron.planning.page import plan_dict, plan_text
from bapo_megatron.planning.plan import make_plan


@dataclass(frozen=True)
class PlanCommand:
    """All flags of ``bapo plan``: those of the recipe and its own, without a prefix."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    options: Annotated[PlanOptions, tyro.conf.arg(name="")] = field(default_factory=PlanOptions)


def plan_command(arguments: Sequence[str]) -> int:
    """Print the recipe's plan; return 0 if it fits, else 1."""
    recipe, command = recipe_command("plan", PlanCommand, arguments)
    command.options.check()
    job = sound_job(command.run, recipe, command.options)
    check_names(command.run, own_code=True)
    plan = make_plan(job)
    advice = smallest_changes(plan) if plan.verdict.memory else []
    others = fastest_layouts(plan, command.options.compare)
    if command.options.as_json:
        found = json.dumps(plan_dict(plan, advice, others))
        # An engine that cannot sample takes infinitely long, which JSON has no number for.
        print(json.dumps(json.loads(found, parse_constant=lambda _name: None), indent=2))
    else:
        print(plan_text(plan, advice, others), end="")
    return 0 if plan.verdict.fits else 1


def sound_job(run: RunConfig, recipe: Path, options: PlanOptions) -> Job:
    """Return the recipe's job for a plan or rehearsal. Raises ConfigError listing its invalid settings."""
    job = Job(run, find_shape(recipe, run.model.hf_path), options)
    if wrong := problems(job):
        raise ConfigError("\n".join(wrong))
    return job
