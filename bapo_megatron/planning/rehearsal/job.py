"""Rehearsal of a job: its flags, the ranks and packs that they choose, and the results of those ranks.

It starts processes. ConfigError for a stage or a rank that the layout does not have, for flags that exclude
each other, and for layers that are not there. Used by
``commands/plan.py`` and ``commands/cluster/job.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge

from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import GpuOptions, Job
from bapo_megatron.planning.records import RankRequest, RankResult
from bapo_megatron.planning.rehearsal.layers import choose_layers
from bapo_megatron.planning.rehearsal.processes import rehearse
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
    packs, busiest = packs_of(job, options), job.expert_imbalance
    requests = [RankRequest(run, rank, packs, expert_imbalance=busiest) for rank in ranks_of(job, options)]

    def report(result: RankResult) -> None:
        how = f"fails in {result.error}" if result.error else "is rehearsed"
        print(f"rank {result.rank} of {job.gpus} {how}", file=sys.stderr, flush=True)

    layers, why = choose_layers(options.layers, run.model.dtype)
    print(f"rehearsing {why}", file=sys.stderr, flush=True)
    return rehearse(requests, layers, options.workers, report)


def one_of_each_stage(results: Sequence[RankResult]) -> list[RankResult]:
    """One rank of each stage: a failed one, else the one with the highest peak."""
    by_stage: dict[int, RankResult] = {}
    for result in sorted(results, key=lambda one: (not one.error, -one.highest)):
        by_stage.setdefault(result.place["stage"], result)
    return [by_stage[stage] for stage in sorted(by_stage)]
