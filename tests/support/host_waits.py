"""A counter of the places where a program on a GPU would wait for it, found on a CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense.default,  # item(), float(), int(), bool()
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.bincount.default,  # asks for the largest bin
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.repeat_interleave.Tensor,
    _aten.equal.default,
    _aten.is_nonzero.default,
}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_COPIES = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.tensor, torch.Tensor.new_tensor}
"""Reads that no operator shows on a CPU, and new tensors of numbers: on a device they are a blocking copy."""


class HostWaits:
    """A context manager that counts, by file and function, what would make the host wait for a GPU.

    It cannot tell the device's tensors from the host's, so reads of the latter are counted as well. In the
    backward pass it sees operators alone.
    """

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()

    def __enter__(self) -> HostWaits:
        self._modes = (_Reads(self.places), _Copies(self.places))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Reads(TorchDispatchMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self._places = places

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS or (func in _INDEXING and _has_mask(args[1])):
            self._places[_caller()] += 1
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _COPIES and not (func is torch.tensor and not (kwargs or {}).get("device")):
            self._places[_caller()] += 1
        return func(*args, **(kwargs or {}))


def _has_mask(indices: list[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_mode(code: CodeType) -> bool:
    return code.co_filename == __file__ or code.co_name == "__torch_function__"


def _caller() -> str:
    """``file function`` of the innermost frame outside torch and outside the function modes."""
    frame = sys._getframe(1)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or _is_mode(frame.f_code)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name} {frame.f_code.co_name}"
