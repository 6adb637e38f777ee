"""Patches of torch for programs on fake tensors of any device; they hold for the whole process.

Used by ``planning/rehearsal/rank.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


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
