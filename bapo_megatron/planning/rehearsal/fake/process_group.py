"""Fake process groups of a rank: a world of the recipe's size in which only this rank exists.

Object collectives give results as if every peer were like this rank; `Collectives` does so for tensors.
torch's object collectives stay patched in this process. Used by ``planning/rehearsal/rank.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from bapo_megatron.config import ParallelConfig
from bapo_megatron.policy.layout import initialize_groups


@contextmanager
def fake_world(rank: int, world_size: int, parallel: ParallelConfig) -> Iterator[dict[str, str]]:
    """Context manager of torch's and megatron's process groups without peers. Yields ``group_kinds``."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())  # type: ignore[no-untyped-call]
    initialize_groups(parallel)
    _answer_object_collectives()
    try:
        yield group_kinds()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def group_kinds() -> dict[str, str]:
    """Kinds of parallelism (TP, CP, PP, ...) by torch's names of the process groups."""
    groups = {
        "TP": parallel_state.get_tensor_model_parallel_group(),
        "CP": parallel_state.get_context_parallel_group(),
        "PP": parallel_state.get_pipeline_model_parallel_group(),
        "DP": parallel_state.get_data_parallel_group(),
        "DPxCP": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "TPxPP": parallel_state.get_model_parallel_group(),
        "EP": parallel_state.get_expert_model_parallel_group(),
        "ETP": parallel_state.get_expert_tensor_parallel_group(),
        "EPxETP": parallel_state.get_expert_tensor_and_model_parallel_group(),
        "expert DP": parallel_state.get_expert_data_parallel_group(),
        "optimizer": parallel_state.get_intra_distributed_optimizer_instance_group(check_initialized=False),
        "embedding": parallel_state.get_embedding_group(check_initialized=False),
        "all": dist.group.WORLD,
    }
    return {group.group_name: kind for kind, group in groups.items() if hasattr(group, "group_name")}


def _answer_object_collectives() -> None:
    """Patch the object collectives: torch sends objects as tensors of unknown sizes, which needs peers."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(output: list[Any], given: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if given:
            output[0] = given[dist.get_rank()]

    module: Any
    for module in (dist, dist.distributed_c10d):
        module.all_gather_object = all_gather_object
        module.gather_object = gather_object
        module.scatter_object_list = scatter_object_list
        module.broadcast_object_list = lambda *_args, **_kwargs: None
