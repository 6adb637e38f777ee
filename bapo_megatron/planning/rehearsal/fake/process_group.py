"""Fake process groups of a rank: a world of the recipe's size in which only this rank exists.

Object collectives give results as if every peer were like this rank; `Collectives` answers those of tensors.
torch's object collectives stay patched in this process, and so does what ``repair_torch`` patches for fake
tensors of any device. Used by ``planning/rehearsal/rank.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
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


def repair_torch() -> None:
    """Patch torch: modules may move fake parameters, optimizers accept them, storages have addresses."""
    torch.utils.swap_tensors = _swap_data
    # Fused and foreach optimizers look at the exact type of a parameter.
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    optimizers._foreach_supported_types.append(FakeTensor)
    # Transformer Engine tells by addresses which tensors lie in one block of memory.
    storages: Any = torch.UntypedStorage
    plain = storages.data_ptr
    fakes: Any = FakeTensor
    fakes.__reduce_ex__ = lambda self, _protocol: (torch.zeros, (tuple(self.shape),))  # objects of a save
    storages.data_ptr = lambda self: self._cdata if self.device.type == "meta" else plain(self)
    # The wrapper of torch.compile, which is off: two Python calls more for each kernel.
    mode: Any = FakeTensorMode
    mode.__torch_dispatch__ = getattr(mode.__torch_dispatch__, "__wrapped__", mode.__torch_dispatch__)


def _swap_data(old: Tensor, new: Tensor) -> None:
    """Replacement of ``swap_tensors``, which refuses a tensor with weak references."""
    if old.untyped_storage()._cdata == new.untyped_storage()._cdata:
        return
    old.data = new.data
    if isinstance(old, FakeTensor):
        old._fake_device = new.device


class ListsOfTensors(TorchFunctionMode):
    """Function mode for ``torch.tensor`` of lists with tensors, which torch reads past the dispatcher."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.tensor and isinstance(args[0], list | tuple):
            args = (_numbers(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _numbers(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_numbers(part) for part in data]
    return data.item() if isinstance(data, Tensor) else data
