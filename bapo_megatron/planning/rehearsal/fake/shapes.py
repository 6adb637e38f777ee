"""Data-dependent shapes (``nonzero``, boolean masks): exact where values are known, else the largest.

The meter asks for them. NotImplementedError for a form that cannot be bounded. Used by ``meter.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from bapo_megatron.planning.rehearsal.fake.values import know, known

aten = torch.ops.aten


class ShapesFromValues:
    """Answers of ``nonzero``, boolean indexing, ``masked_select``, ``bincount``, ``repeat_interleave``.

    ``read`` is called before each result with the tensor whose values decide: if it is on the GPU, the host
    waits.
    """

    def __init__(self, read: Callable[[Tensor, str], None]) -> None:
        self._read = read
        self._selected: int | None = None

    @contextmanager
    def selecting(self, count: int) -> Iterator[None]:
        """Context manager in which a mask of unknown values selects ``count`` entries, and nothing waits."""
        self._selected = count
        try:
            yield
        finally:
            self._selected = None

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Fake result of a kernel with a data-dependent shape; None for any other kernel."""
        if func is aten.nonzero.default:
            return self._nonzero(args[0])
        if func is aten.index.Tensor and any(_is_mask(one) for one in args[1]):
            return self._by_mask(args[0], args[1])
        if func is aten.masked_select.default:
            return self._by_mask(args[0], [args[1]])
        if func is aten.bincount.default:
            return self._bincount(func, args, kwargs)
        if func is aten.repeat_interleave.Tensor:
            return self._repeats(func, args, kwargs)
        return None

    def _nonzero(self, tensor: Tensor) -> Tensor:
        values = self._values(tensor, "nonzero")
        if values is None:
            return torch.empty((tensor.numel(), tensor.dim()), dtype=torch.int64, device=tensor.device)
        with unset_fake_temporarily():
            found = values.nonzero()
        return _like(found, tensor.device)

    def _by_mask(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        mask, *rest = indices
        if mask is None or any(one is not None for one in rest):
            raise NotImplementedError("a boolean mask beside other indices")
        if mask.device != tensor.device and mask.device.type != "cpu":
            raise RuntimeError(f"indices on {mask.device} of a tensor on {tensor.device}")
        if self._selected is not None and known(mask) is None:
            return torch.empty((self._selected,), dtype=tensor.dtype, device=tensor.device)
        values, source = self._values(mask, "boolean indexing"), known(tensor)
        if values is not None and source is not None:
            with unset_fake_temporarily():
                found = source[values]
            return _like(found, tensor.device)
        count = mask.numel()
        if values is not None:
            with unset_fake_temporarily():
                count = int(values.count_nonzero())
        return torch.empty((count, *tensor.shape[mask.dim() :]), dtype=tensor.dtype, device=tensor.device)

    def _bincount(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        values = self._values(args[0], "bincount")
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        if values is None:
            return torch.empty((least,), dtype=torch.int64, device=args[0].device)
        with unset_fake_temporarily():
            found = func(values, minlength=least)
        return _like(found, args[0].device)

    def _repeats(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        values = self._values(args[0], "repeat_interleave")
        if values is None:
            raise NotImplementedError("repeat_interleave by counts that only the model knows")
        with unset_fake_temporarily():
            found = func(values, **kwargs)
        return _like(found, args[0].device)

    def _values(self, tensor: Tensor, what: str) -> Tensor | None:
        self._read(tensor, what)
        return known(tensor)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _like(value: Tensor, device: torch.device) -> Tensor:
    """A fake tensor on ``device`` with the shape of ``value``, and its values."""
    fake = torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
    know(fake, value)
    return fake
