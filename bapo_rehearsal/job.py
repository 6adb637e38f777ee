"""Rehearsal of a job: flags, choice of layers, ranks and packs, and one process per rank.

A rehearsal patches torch permanently. So one host process imports everything once and forks a process per
rank; the caller's process stays unpatched. A failed or killed rank yields a result with an error.

Raises ConfigError for a stage or rank outside the layout, for conflicting flags, and for missing layers.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge

from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import GpuOptions, Job
from bapo_megatron.runtime.files import check_output_file
from bapo_megatron.runtime.processes import die_with_parent
from bapo_rehearsal.records import RankRequest, RankResult
from bapo_rehearsal.te_sources import te_folder, te_version

Layers = Literal["te", "torch"]


@dataclass(frozen=True)
class RehearseOptions(GpuOptions):
    """Flags of ``bapo rehearse`` besides the recipe's."""

    stage: Annotated[int | None, Ge(0)] = None
    """Rehearse the first rank of this pipeline stage. None: of the first, a middle and the last stage."""
    rank: Annotated[int | None, Ge(0)] = None
    """Rehearse this rank."""
    all_ranks: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Rehearse every rank, and compare the collectives of every group call by call."""
    layers: Layers | None = None
    """Transformer Engine's layers or torch's. None: Transformer Engine's where its sources are found."""
    packs: Annotated[int | None, Ge(1)] = None
    """Packs of an update. None: one; in a pipeline one more than it has stages, if it is interleaved twice as
    many as stages; with batch.hold_forwards all; never more than an update has."""
    workers: Annotated[int | None, Ge(1)] = None
    """Ranks that are rehearsed at a time. None: one for each core."""
    json: Path | None = None
    """Write everything as one JSON object into this file."""

    def check(self) -> None:
        """Raise ConfigError for conflicting flags and for a file that cannot be written."""
        super().check()
        is_set = {
            "--rank": self.rank is not None,
            "--stage": self.stage is not None,
            "--all-ranks": self.all_ranks,
        }
        names = [name for name, is_given in is_set.items() if is_given]
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} exclude each other: give one")
        if self.json is not None:
            check_output_file("--json", self.json)


def ranks_of(job: Job, options: RehearseOptions) -> list[int]:
    """Ranks to rehearse. Raises ConfigError for a stage or rank outside the layout."""
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
    """Packs of a rehearsed update: ``--packs``, or enough for the highest peak.

    A pipeline is full after as many packs as stages; the interleaved schedule takes a multiple of them.
    ``batch.hold_forwards`` keeps the activations of all packs.
    """
    if options.packs is not None:
        return options.packs
    stages = job.parallel.pipeline
    if job.holds_forwards:
        return job.micro_batches
    if job.parallel.virtual > 1:
        return min(job.micro_batches, 2 * stages)
    return min(job.micro_batches, stages + 1 if stages > 1 else 1)


def rehearse_job(job: Job, folder: Path, options: RehearseOptions) -> list[RankResult]:
    """Results of the chosen ranks. ``folder`` contains the model's config.json. Progress goes to stderr.

    Starts processes and takes minutes. A failed rank yields a result with an error, not an exception.
    """
    run = replace(job.run, model=replace(job.run.model, hf_path=folder))
    packs, busiest = packs_of(job, options), job.expert_imbalance
    few = not options.all_ranks  # with all ranks, each prints only one line, at its end
    requests = [
        RankRequest(run, rank, packs, expert_imbalance=busiest, names_phases=few)
        for rank in ranks_of(job, options)
    ]

    def report(result: RankResult) -> None:
        how = f"fails in {result.error}" if result.error else "is rehearsed"
        print(f"rank {result.rank} of {job.gpus} {how}", file=sys.stderr, flush=True)

    layers, why = choose_layers(options.layers, run.model.dtype)
    print(f"rehearsing {why}", file=sys.stderr, flush=True)
    return rehearse(requests, layers, options.workers, report)


def one_of_each_stage(results: Sequence[RankResult]) -> list[RankResult]:
    """One result per stage: that of a failed rank, otherwise of the rank with the highest peak."""
    by_stage: dict[int, RankResult] = {}
    for result in sorted(results, key=lambda item: (not item.error, -item.highest)):
        by_stage.setdefault(result.place["stage"], result)
    return [by_stage[stage] for stage in sorted(by_stage)]


def choose_layers(asked: Layers | None, dtype: str) -> tuple[Layers, str]:
    """Layers to rehearse, and a sentence with the reason. ``asked`` None: the layers of the run on a GPU, or
    torch's without their sources. Raises ConfigError if the ``asked`` layers are missing or not the run's."""
    if asked == "torch":
        return "torch", "torch's layers, as asked for"
    if dtype == "float32":
        if asked == "te":
            raise ConfigError("--layers te: a run in float32 has torch's layers; leave it out")
        return "torch", "torch's layers: the run is in float32"
    if asked == "te":
        te_folder()
        return "te", f"Transformer Engine {te_version()}'s layers, as asked for"
    try:
        te_folder()
    except ConfigError as error:
        return "torch", f"torch's layers, and not those of Transformer Engine that a GPU would have: {error}"
    return "te", f"Transformer Engine {te_version()}'s layers"


def prepare_layers(layers: Layers) -> None:
    """Import all modules of a rank, in a process that will only fork ranks (the host process)."""
    # Import order: Transformer Engine checks for a GPU on import, so the fake GPU comes first; megatron
    # checks for Transformer Engine on import, so megatron comes last.
    for name in ("apex", "amp_C"):  # their compiled kernels reject fake tensors
        sys.modules[name] = None  # type: ignore[assignment]
    if layers == "te":
        from bapo_rehearsal.fake.cuda_device import answer_queries
        from bapo_rehearsal.transformer_engine.installation import (
            accept_fake_tensors,
            install,
        )

        answer_queries(lambda: None)
        install(te_folder(), answer_cuda=False)
        accept_fake_tensors()
    else:  # hide an installed Transformer Engine
        for name in ("transformer_engine", "transformer_engine_torch"):
            sys.modules[name] = None  # type: ignore[assignment]
    from bapo_rehearsal import rank  # noqa: F401  imports torch and megatron


def rehearse(
    requests: Sequence[RankRequest],
    layers: Layers = "torch",
    workers: int | None = None,
    on_result: Callable[[RankResult], None] = lambda _: None,
) -> list[RankResult]:
    """Rehearse all requests. Returns results in their order; calls ``on_result`` as each rank ends.

    ``workers``: ranks at a time; None: one per core. Raises RuntimeError if the host process dies.
    """
    # A forked child inherits imported modules; Transformer Engine must be installed before megatron.
    reimports = layers == "te" or find_spec("transformer_engine") is not None
    start = "spawn" if reimports and "megatron" in sys.modules else "fork"
    context: Any = multiprocessing.get_context(start)
    workers = workers or len(os.sched_getaffinity(0))
    results: dict[int, RankResult] = {}
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        receiver, sender = context.Pipe(duplex=False)
        host = context.Process(target=_host, args=(requests, layers, workers, Path(folder), sender))
        host.start()
        sender.close()  # so that recv() fails when the host dies
        while len(results) < len(requests):
            try:
                index = receiver.recv()
            except EOFError:
                raise RuntimeError("the rehearsal's process has died; its messages are above") from None
            results[index] = pickle.loads((Path(folder) / str(index)).read_bytes())
            on_result(results[index])
        host.join()
    return [results[index] for index in range(len(requests))]


def _host(
    requests: Sequence[RankRequest], layers: Layers, workers: int, folder: Path, sender: Connection
) -> None:
    """Host process: import everything, then fork a process per request, ``workers`` at a time."""
    die_with_parent()
    gc.freeze()  # finalizers of the caller's garbage may wait for threads that a fork lacks
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from bapo_megatron.runtime.device import silence_libraries
    from bapo_megatron.runtime.garbage import collect_rarely, keep_imports

    silence_libraries()
    collect_rarely()
    prepare_layers(layers)
    keep_imports()  # ranks collect garbage in every phase
    running: dict[int, int] = {}
    waiting = list(range(len(requests)))
    while waiting or running:
        while waiting and len(running) < workers:
            index = waiting.pop(0)
            running[_fork(requests[index], layers, folder / str(index))] = index
        pid, status = os.waitpid(-1, 0)
        index = running.pop(pid)
        if status:
            _write(_dead(requests[index], layers, status), folder / str(index))
        sender.send(index)


def _fork(request: RankRequest, layers: Layers, path: Path) -> int:
    """Rehearse one rank in a forked child, which writes its result to ``path``. Returns the child's pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        from bapo_rehearsal.rank import rehearse_rank

        die_with_parent()
        _write(rehearse_rank(request, layers), path)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # a fork must not run its parent's exit handlers


def _write(result: RankResult, path: Path) -> None:
    path.write_bytes(pickle.dumps(result))


def _dead(request: RankRequest, layers: Layers, status: int) -> RankResult:
    code = os.waitstatus_to_exitcode(status)
    why = f"its process was killed by signal {-code}" if code < 0 else "its process failed; see above"
    return RankResult(request.rank, request.place, layers, request.packs, error=why)
