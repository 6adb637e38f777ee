"""Parallel layout: data-parallel size, divisibility checks, and megatron's process groups.

``data_parallel_size``, ``layout_problems`` (texts) and ``chunk_layers`` need neither megatron-core nor a
process group. Every rank creates its policy within the context manager ``parallel_processes``, which
initializes torch.distributed and megatron's groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate

from bapo_megatron.config import ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.layers import Block, Kind
from bapo_megatron.layers.costs import Cut


def data_parallel_size(parallel: ParallelConfig, world_size: int | None) -> int:
    """Data-parallel size for ``world_size`` processes; None (not started): ``parallel.data``, or 1. Raises
    ConfigError if the layout does not fit that number."""
    if world_size is None:
        return parallel.data or 1
    size, rest = divmod(world_size, parallel.model_size)
    if rest or size == 0:
        raise ConfigError(
            f"{world_size} processes cannot hold parallel.tensor x pipeline x context = "
            f"{parallel.tensor} x {parallel.pipeline} x {parallel.context} = {parallel.model_size}: "
            f"start a multiple of {parallel.model_size}"
        )
    if parallel.data is not None and parallel.data != size:
        raise ConfigError(
            f"parallel.data={parallel.data} but {world_size} processes make {size}: "
            f"leave parallel.data out or start {parallel.data * parallel.model_size} processes"
        )
    return size


def layout_problems(parallel: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    """Yield divisibility problems of a model in a layout, each with the fix."""
    cuts = [*(cut for kind in shape.kinds for cut in kind.cuts()), Cut("tensor", "vocabulary", shape.vocab)]
    yield from _cut_problems("tensor", parallel.tensor, cuts)
    yield from _head_problems(parallel, cuts)
    yield from _expert_problems(parallel, cuts)
    chunks = parallel.pipeline * parallel.virtual
    if shape.layers < chunks:
        yield (
            f"parallel.pipeline x virtual = {parallel.pipeline} x {parallel.virtual} makes {chunks} model "
            f"chunks of the model's {shape.layers} layers: use at most {shape.layers}"
        )
    if parallel.pipeline_layers and sum(parallel.pipeline_layers) != shape.layers:
        yield (
            f"parallel.pipeline_layers={' '.join(map(str, parallel.pipeline_layers))} are "
            f"{sum(parallel.pipeline_layers)} layers, but the model has {shape.layers}: make them add up, or "
            f"leave the field out for {' '.join(map(str, _like_sizes(shape.layers, chunks)))}"
        )


def chunk_layers(parallel: ParallelConfig, layers: int) -> tuple[int, ...]:
    """Layers per model chunk: ``parallel.pipeline_layers``, or nearly equal; chunk c is on stage c mod PP."""
    return parallel.pipeline_layers or _like_sizes(layers, parallel.pipeline * parallel.virtual)


def _like_sizes(layers: int, chunks: int) -> tuple[int, ...]:
    """Chunk sizes that differ by at most one layer.

    The smaller chunks are the last, which also has the output layer, and then the first ones: the first has
    the embedding, and earlier stages hold the activations of more forward passes.
    """
    longest = -(-layers // chunks)
    shorter = [chunks - 1, *range(chunks - 1)][: longest * chunks - layers]
    return tuple(longest - (chunk in shorter) for chunk in range(chunks))


def stage_kinds(parallel: ParallelConfig, shape: ModelShape) -> list[Counter[Kind]]:
    """Number of layers of each kind on each pipeline stage, over all its chunks."""
    counts = [Counter[Kind]() for _ in range(parallel.pipeline)]
    for number, chunk in enumerate(chunk_blocks(parallel, shape)):
        for block, count in chunk.items():
            counts[number % parallel.pipeline].update(dict.fromkeys(block.kinds, count))
    return counts


@lru_cache(maxsize=64)
def chunk_blocks(parallel: ParallelConfig, shape: ModelShape) -> list[Counter[Block]]:
    """Number of layers per block in each model chunk, in model order."""
    sizes = chunk_layers(parallel, shape.layers)
    parts = (shape.pattern[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True))
    return [Counter({shape.blocks[own]: count for own, count in Counter(part).items()}) for part in parts]


def _cut_problems(axis: str, ranks: int, cuts: Sequence[Cut]) -> Iterator[str]:
    sizes = {cut.title: cut.size for cut in cuts if cut.axis == axis}
    for title, size in sizes.items():
        if size % ranks:
            yield (
                f"parallel.{axis}={ranks} does not divide the model's {title} ({size}): "
                f"use one of {_divisors(*sizes.values())}"
            )


def _head_problems(parallel: ParallelConfig, cuts: Sequence[Cut]) -> Iterator[str]:
    """Problems of heads sharded by both TP and CP: under CP a rank has all tokens of some heads."""
    ranks = parallel.tensor * parallel.context
    for cut in cuts:
        if cut.axis == "heads" and cut.size % ranks:
            yield (
                f"parallel.tensor x context = {parallel.tensor} x {parallel.context} = {ranks} does not "
                f"divide the model's {cut.title} ({cut.size}): use a product of {_divisors(cut.size)}"
            )


def _expert_problems(parallel: ParallelConfig, cuts: Sequence[Cut]) -> Iterator[str]:
    own = f"parallel.expert x expert_tensor = {parallel.expert} x {parallel.expert_tensor}"
    if not any(cut.axis == "expert" for cut in cuts):
        if parallel.expert * parallel.expert_tensor > 1:
            yield f"{own}, but the model has no experts: leave both at 1"
        return
    yield from _cut_problems("expert", parallel.expert, cuts)
    yield from _cut_problems("expert_tensor", parallel.expert_tensor, cuts)
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"parallel.tensor={parallel.tensor} of a model with experts needs sequence parallelism: "
            "set parallel.sequence=True"
        )
    ranks = parallel.tensor * parallel.context * (parallel.data or 1)
    if parallel.data is not None and ranks % (parallel.expert * parallel.expert_tensor):
        yield (
            f"{own} does not divide the ranks of a pipeline stage, parallel.tensor x context x data = "
            f"{parallel.tensor} x {parallel.context} x {parallel.data} = {ranks}"
        )


def _divisors(*numbers: int) -> list[int]:
    return [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers) and d <= 64]


@contextmanager
def parallel_processes(parallel: ParallelConfig) -> Iterator[None]:
    """Context manager that selects this rank's device and creates the process groups of torch.distributed and
    megatron, until the exit. Collective: every rank enters it before creating a policy."""
    from bapo_megatron.policy.device import backend, select_device  # torch, which layouts do not need
    from bapo_megatron.runtime.distributed import process_group

    select_device()
    with process_group(backend(), parallel.timeout_minutes):
        from megatron.core import parallel_state

        initialize_groups(parallel)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def initialize_groups(parallel: ParallelConfig) -> None:
    """Initialize megatron's process groups and RNG tracker, in the default process group. Collective."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=parallel.timeout_minutes,  # megatron's default is 30
    )
    # The model draws no random numbers (no dropout, weights from a file), so a tracker that leaves the
    # generator alone suffices, on a GPU as well.
    initialize_rng_tracker(inference_rng_tracker=True)
