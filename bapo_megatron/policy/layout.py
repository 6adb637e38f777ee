"""The parallel layout: data-parallel size, divisibility checks, and megatron's process groups.

The checks need neither megatron-core nor a process group, and run before either exists. A policy needs the
groups: every rank makes it within ``parallel_processes``, a context manager.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bapo_megatron.config import ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape


def data_parallel_size(parallel: ParallelConfig, world_size: int | None) -> int:
    """The data-parallel size for ``world_size`` processes; None: they are not started yet.

    ConfigError if the layout does not fit their number.
    """
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
    """Divisibility problems of a model in a layout, each with the fix."""
    sizes = {"attention heads": shape.heads, "KV heads": shape.kv_heads}
    if shape.experts is None:
        sizes["MLP width"] = shape.ffn
    sizes["vocabulary"] = shape.vocab
    for title, size in sizes.items():
        if size % parallel.tensor:
            yield (
                f"parallel.tensor={parallel.tensor} does not divide the model's {title} ({size}): "
                f"use one of {_divisors(*sizes.values())}"
            )
    yield from _expert_problems(parallel, shape)
    chunks = parallel.pipeline * parallel.virtual
    if shape.layers % chunks:
        yield (
            f"parallel.pipeline x virtual = {parallel.pipeline} x {parallel.virtual} does not divide the "
            f"model's {shape.layers} layers: use one of {_divisors(shape.layers)}"
        )


def _expert_problems(parallel: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    own = f"parallel.expert x expert_tensor = {parallel.expert} x {parallel.expert_tensor}"
    if shape.experts is None:
        if parallel.expert * parallel.expert_tensor > 1:
            yield f"{own}, but the model has no experts: leave both at 1"
        return
    for field, size, title, whole in (
        ("expert", parallel.expert, "experts", shape.experts.count),
        ("expert_tensor", parallel.expert_tensor, "experts' width", shape.experts.ffn),
    ):
        if whole % size:
            yield (
                f"parallel.{field}={size} does not divide the model's {title} ({whole}): "
                f"use one of {_divisors(whole)}"
            )
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
    """The process groups of torch.distributed and megatron, and this rank's device, within the block.

    Collective: every rank enters it before it makes a policy.
    """
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
    """Initialize megatron's process groups and its RNG tracker. Collective.

    The default process group must exist.
    """
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
    # The model draws no random numbers (no dropout, weights come from a file), so the tracker that leaves
    # the generator alone is enough, on a GPU as well.
    initialize_rng_tracker(inference_rng_tracker=True)
