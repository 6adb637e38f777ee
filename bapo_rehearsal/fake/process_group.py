"""Fake process groups of a rank and their collectives, in a world of the recipe's size without peers.

Each collective is recorded, for the deadlock check and the page (``results.py``), and returns immediately.
Buffers keep their shapes, so most collectives need no result: received values become unknown. Reductions by
MAX and MIN, broadcasts, objects and the shapes that pipeline stages announce are answered as if every peer
were like this rank.

The patches of torch, of its object collectives and by ``repair_torch``, are never undone in this process.
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
from torch._C._distributed_c10d import FakeWork, ProcessGroup  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from bapo_megatron.config import ParallelConfig
from bapo_megatron.policy.layout import initialize_groups
from bapo_rehearsal.fake.ledger import program_line
from bapo_rehearsal.fake.values import forget, know
from bapo_rehearsal.records import Call

_ALL_TO_SOME = (
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("gather_", "scatter_", "alltoall_", "alltoall_base_"),
)
_GROUP_AT = dict.fromkeys(_ALL_TO_SOME, 2)
"""Position of the group among a kernel's arguments, if it is not 1."""
_WHOLE_IS_INPUT = {"_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_"}
_WORK_ONLY = {
    *("send", "recv_", "recv_any_source_", "reduce_", "gather_", "barrier", "monitored_barrier_"),
    *("allreduce_coalesced_", "reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_"),
    *("allgather_coalesced_", "alltoall_base_"),
}
"""Kernels that return only the work; the others also return their outputs."""
_POINT_TO_POINT = {"send", "recv_"}
_SHAPE_ANNOUNCEMENT = 3
"""Entries of the int64 message in which a stage announces its next message's shape."""
_NAMES = {"_allgather_base_": "all_gather", "allgather_": "all_gather", "allreduce_": "all_reduce"}
_NAMES |= {"allgather_into_tensor_coalesced_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
_NAMES |= {"reduce_scatter_tensor_coalesced_": "reduce_scatter", "recv_": "recv", "broadcast_": "broadcast"}


@contextmanager
def fake_world(rank: int, world_size: int, parallel: ParallelConfig) -> Iterator[dict[str, str]]:
    """Context manager of torch's and megatron's process groups without peers. Yields ``group_kinds()``."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())  # type: ignore[no-untyped-call]
    initialize_groups(parallel)
    _answer_object_collectives()
    try:
        yield group_kinds()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def group_kinds() -> dict[str, str]:
    """Kinds of parallelism (TP, CP, PP, ...) by torch's process group names."""
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
    """Patch object collectives: torch sends objects as tensors whose sizes only peers know."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(output: list[Any], objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if objects:
            output[0] = objects[dist.get_rank()]

    module: Any
    for module in (dist, dist.distributed_c10d):
        module.all_gather_object = all_gather_object
        module.gather_object = gather_object
        module.scatter_object_list = scatter_object_list
        module.broadcast_object_list = lambda *_args, **_kwargs: None


def repair_torch() -> None:
    """Patch torch: modules can move fake parameters, optimizers accept them, storages have addresses."""
    torch.utils.swap_tensors = _swap_data
    # Fused and foreach optimizers check the exact type of a parameter.
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    optimizers._foreach_supported_types.append(FakeTensor)
    # Transformer Engine compares addresses to find tensors in one block of memory.
    storages: Any = torch.UntypedStorage
    plain = storages.data_ptr
    fakes: Any = FakeTensor
    fakes.__reduce_ex__ = lambda self, _protocol: (torch.zeros, (tuple(self.shape),))  # objects of a save
    storages.data_ptr = lambda self: self._cdata if self.device.type == "meta" else plain(self)
    # Without torch.compile's wrapper, two Python calls per kernel.
    mode: Any = FakeTensorMode
    mode.__torch_dispatch__ = getattr(mode.__torch_dispatch__, "__wrapped__", mode.__torch_dispatch__)


def _swap_data(old: Tensor, new: Tensor) -> None:
    """Replacement for ``swap_tensors``, which rejects a tensor with weak references."""
    if old.untyped_storage()._cdata == new.untyped_storage()._cdata:
        return
    old.data = new.data
    if isinstance(old, FakeTensor):
        old._fake_device = new.device


class ListsOfTensors(TorchFunctionMode):
    """Function mode for ``torch.tensor`` of lists with tensors, which bypasses the dispatcher."""

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


class Collectives:
    """Recorder of one rank's collectives, in order; ``answer`` also gives the meter their results. Raises
    RuntimeError or ValueError where NCCL would reject a call."""

    def __init__(self, names: Mapping[str, str], book: Callable[[Tensor, str], None]) -> None:
        """``names``: group kinds by torch's names; ``book`` records a buffer that NCCL allocates."""
        self.calls: list[Call] = []
        self.message_shape: tuple[int, ...] = ()
        """Shape of a message between pipeline stages."""
        self._names, self._book = names, book

    def answer(self, func: Any, args: Sequence[Any], phase: str) -> Any:
        """Record a collective and return what torch's kernel would return."""
        call, tensors = self.note(func, args, phase)
        name = _kernel(func)
        if name in ("allgather_", "reduce_scatter_") and call.device == "cuda" and len(call.ranks) > 1:
            # NCCL takes one flat tensor, into which ProcessGroupNCCL copies a list of tensors.
            flat = torch.empty((call.size,), dtype=torch.uint8, device=tensors[0].device)
            self._book(flat, f"{call.op} of a list")
        self._receive(name, tensors, args)
        work = FakeWork().boxed()
        return work if name in _WORK_ONLY else (args[0], work)

    def note(self, func: Any, args: Sequence[Any], phase: str) -> tuple[Call, list[Tensor]]:
        name = _kernel(func)
        group = ProcessGroup.unbox(args[_GROUP_AT.get(name, 1)])
        tensors = _tensors(args[:2]) if name != "barrier" else []
        whole = _tensors(args[name in _WHOLE_IS_INPUT]) if tensors else []
        self._check(name, tensors, args, group.size())
        ranks = tuple(dist.get_process_group_ranks(group))
        call = Call(
            op=_NAMES.get(name, name.strip("_")),
            group=self._names.get(group.group_name, "other"),
            ranks=ranks,
            size=sum(tensor.nbytes for tensor in whole),
            dtype=str(tensors[0].dtype)[6:] if tensors else "",
            device=tensors[0].device.type if tensors else "",
            peer=ranks[args[2]] if name in (*_POINT_TO_POINT, "broadcast_") else None,
            line=program_line(),
            phase=phase,
        )
        self.calls.append(call)
        return call, tensors

    @staticmethod
    def _check(name: str, tensors: list[Tensor], args: Sequence[Any], ranks: int) -> None:
        """NCCL's checks: mixed devices, non-contiguous tensors, sizes that do not fit the group."""
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) > 1:
            raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(devices))}")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: a tensor of shape {list(tensor.shape)} is not contiguous")
        if name not in ("allgather_", "_allgather_base_", "_reduce_scatter_base_"):
            return
        whole, part = (args[1], args[0]) if name == "_reduce_scatter_base_" else (args[0], args[1])
        pieces, (own, *_) = _tensors(whole), _tensors(part)
        if sum(piece.numel() for piece in pieces) != ranks * own.numel():
            raise ValueError(
                f"{name}: {[list(piece.shape) for piece in pieces]} does not hold {list(own.shape)} of "
                f"each of {ranks} ranks"
            )

    def _receive(self, name: str, tensors: list[Tensor], args: Sequence[Any]) -> None:
        """Mark received values as unknown, unless peers like this rank would send the same."""
        if name == "recv_" and tensors[0].dtype == torch.int64 and tensors[0].numel() == _SHAPE_ANNOUNCEMENT:
            with unset_fake_temporarily():
                know(tensors[0], torch.tensor(self.message_shape))
            return
        if name in ("send", "barrier", "broadcast_"):
            return
        if name == "allreduce_" and args[2].op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            return
        for tensor in _tensors(args[0]):
            forget(tensor)


def _kernel(func: Any) -> str:
    name: str = func.name().removeprefix("c10d::")
    return name.split(".")[0]


def _tensors(value: Any) -> list[Tensor]:
    leaves = tree_leaves(list(value) if isinstance(value, tuple) else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
