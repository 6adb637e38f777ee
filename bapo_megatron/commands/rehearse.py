"""``bapo rehearse RECIPE [flags]``: a dry run of the recipe's real program on fake tensors, rank by rank.

Fake tensors have shapes and no data, so neither GPUs nor weights are needed. Each rank runs in a child
process, some at a time. ConfigError for a recipe that cannot be rehearsed. Used by
``commands/cluster/job.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge

from bapo_megatron.commands.plan.advice import problems
from bapo_megatron.commands.plan.job import GpuOptions, Job, PlanOptions, find_shape, shape_folder
from bapo_megatron.commands.recipe_flags import check_names, parse_flags, recipe_path
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.rehearsal.layers import choose_layers
from bapo_megatron.rehearsal.match import collective_mismatches
from bapo_megatron.rehearsal.processes import rehearse
from bapo_megatron.rehearsal.records import RankRequest, RankResult
from bapo_megatron.rehearsal.results.page import page_text
from bapo_megatron.rehearsal.results.summary import as_dict
from bapo_megatron.runtime.files import check_output_file


@dataclass(frozen=True)
class RehearseOptions(GpuOptions):
    """The flags of ``bapo rehearse`` beside the recipe's."""

    stage: Annotated[int | None, Ge(0)] = None
    """Rehearse the first rank of this pipeline stage. None: of the first, a middle and the last stage."""
    rank: Annotated[int | None, Ge(0)] = None
    """Rehearse this rank."""
    all_ranks: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Rehearse every rank, and compare the collectives of every group call by call."""
    layers: Literal["te", "torch"] | None = None
    """Transformer Engine's layers or torch's. None: Transformer Engine's where its sources are found."""
    packs: Annotated[int | None, Ge(1)] = None
    """Packs of an update. None: one; in a pipeline one more than it has stages, if it is interleaved twice as
    many as stages; with batch.hold_forwards all; never more than an update has."""
    workers: Annotated[int | None, Ge(1)] = None
    """Ranks that are rehearsed at a time. None: one for each core."""
    json: Path | None = None
    """Write everything as one JSON object into this file."""

    def check(self) -> None:
        """Raise ConfigError for flags that exclude each other, and for a file that cannot be written."""
        super().check()
        given = {
            "--rank": self.rank is not None,
            "--stage": self.stage is not None,
            "--all-ranks": self.all_ranks,
        }
        names = [name for name, is_given in given.items() if is_given]
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} exclude each other: give one")
        if self.json is not None:
            check_output_file("--json", self.json)


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
    plan_options = PlanOptions(gpu=options.gpu, memory_fraction=options.memory_fraction)
    job = Job(run, find_shape(recipe, run.model.hf_path), plan_options)
    if found := problems(job):
        raise ConfigError("\n".join(found))
    results = rehearse_job(job, shape_folder(recipe, run.model.hf_path), options)
    notes = collective_mismatches(results) if options.all_ranks else []
    shown = results if not options.all_ranks else _kinds(results)
    print(page_text(shown, job, notes), end="")
    summary = as_dict(results, job, notes)
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1))
    return 0 if summary["fits"] else 1


def ranks_of(job: Job, options: RehearseOptions) -> list[int]:
    """The ranks to rehearse. ConfigError for a stage or a rank that the layout does not have."""
    per_stage = job.gpus // job.parallel.pipeline
    if options.all_ranks:
        return list(range(job.gpus))
    if options.rank is not None:
        if options.rank >= job.gpus:
            raise ConfigError(f"--rank {options.rank}: the layout has ranks 0 to {job.gpus - 1}")
        return [options.rank]
    last = job.parallel.pipeline - 1
    if options.stage is not None:
        if options.stage > last:
            raise ConfigError(f"--stage {options.stage}: the layout has stages 0 to {last}")
        return [options.stage * per_stage]
    return [stage * per_stage for stage in sorted({0, (last + 1) // 2, last})]


def packs_of(job: Job, options: RehearseOptions) -> int:
    """Packs of a rehearsed update: those asked for, else enough for the highest peak.

    A pipeline is full after as many packs as it has stages; the interleaved schedule takes a multiple of
    them. ``batch.hold_forwards`` keeps the activations of all packs of an update.
    """
    if options.packs is not None:
        return options.packs
    stages = job.parallel.pipeline
    if job.run.batch.hold_forwards:
        return job.micro_batches
    if job.parallel.virtual > 1:
        return min(job.micro_batches, 2 * stages)
    return min(job.micro_batches, stages + 1 if stages > 1 else 1)


def rehearse_job(job: Job, folder: Path, options: RehearseOptions) -> list[RankResult]:
    """The results of the chosen ranks. ``folder`` has the model's config.json. Progress goes to stderr.

    It starts processes and takes minutes. A rank that fails is a result with an error, not an exception.
    """
    run = replace(job.run, model=replace(job.run.model, hf_path=folder))
    requests = [RankRequest(run, rank, packs_of(job, options)) for rank in ranks_of(job, options)]

    def report(result: RankResult) -> None:
        how = f"fails in {result.error}" if result.error else "is rehearsed"
        print(f"rank {result.rank} of {job.gpus} {how}", file=sys.stderr, flush=True)

    layers, why = choose_layers(options.layers, run.model.dtype)
    print(f"rehearsing {why}", file=sys.stderr, flush=True)
    return rehearse(requests, layers, options.workers, report)


def _kinds(results: Sequence[RankResult]) -> list[RankResult]:
    """One rank of each stage: a failed one, else the one with the highest peak."""
    by_stage: dict[int, RankResult] = {}
    for result in sorted(results, key=lambda one: (not one.error, -one.highest)):
        by_stage.setdefault(result.place["stage"], result)
    return [by_stage[stage] for stage in sorted(by_stage)]
