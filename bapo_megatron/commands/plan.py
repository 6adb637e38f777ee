"""``bapo plan RECIPE [flags]``: memory, traffic and speed of a recipe on a kind of GPU.

Arithmetic on the recipe and the model's config.json; it needs no GPU and no weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from bapo_megatron.commands.recipe_flags import check_names, parse_flags, recipe_path
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
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
    """Print the plan of the recipe. Exit code 1 if it does not fit, else 0."""
    recipe = recipe_path("plan", arguments)
    command = parse_flags("plan", recipe, PlanCommand(load_recipe(recipe, RunConfig)), arguments)
    command.options.check()
    job = Job(command.run, find_shape(recipe, command.run.model.hf_path), command.options)
    if found := problems(job):
        raise ConfigError("\n".join(found))
    check_names(command.run)
    plan = make_plan(job)
    advice = smallest_changes(plan) if plan.verdict.memory else []
    if command.options.as_json:
        print(json.dumps({**plan_dict(plan), "advice": [vars(change) for change in advice]}, indent=2))
    else:
        print(plan_text(plan, advice, fastest_layouts(plan, command.options.compare)), end="")
    return 0 if plan.verdict.fits else 1
