"""Constant propagation: fake tensors that are computed from host data alone keep real values, if small.

The meter calls ``propagate`` after each kernel. A pack's tokens, masks, bounds and positions are known, and
so is everything computed from them; hidden states are not. So a data-dependent shape (``nonzero`` of a mask)
is exact if it follows from the program's own data. Otherwise ``ShapesFromValues`` gives ``nonzero`` and masks
the largest shape, and ``bincount`` its ``minlength``. Raises NotImplementedError for ``repeat_interleave`` of
unknown counts, and for a mask beside other indices. Unknown values that the host reads are guessed as ones:
finite, positive and true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

_LARGEST = 1 << 17
"""Maximum elements of a tensor whose values are kept: more than the longest pack has."""
_CPU = torch.device("cpu")
_NAME = "_known"  # an attribute: nn.Module.to rejects tensors in a weak dictionary
_STALE = "_stale"


def known(tensor: Tensor) -> Tensor | None:
    """Values of a tensor, on the CPU, if they follow from host data alone; otherwise None."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.numel() <= _LARGEST else None
    value: Tensor | None = tensor.__dict__.get(_NAME)
    if value is None:
        return tensor.constant
    return None if hasattr(value.untyped_storage(), _STALE) else value


def know(tensor: Tensor, value: Tensor) -> None:
    """Attach values to a fake tensor."""
    if isinstance(tensor, FakeTensor):
        tensor.__dict__[_NAME] = value


def forget(tensor: Tensor) -> None:
    """Drop the values of a fake tensor and of all views of its storage, after a write of unknown values."""
    if isinstance(tensor, FakeTensor):
        value = known(tensor)
        if value is not None:
            setattr(value.untyped_storage(), _STALE, True)
        tensor.__dict__[_NAME] = tensor.constant = None


def guess(tensor: Tensor) -> Tensor:
    """Guessed values of an unknown tensor: ones."""
    with unset_fake_temporarily():
        return torch.ones(tuple(tensor.shape), dtype=tensor.dtype)


def propagate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Compute the values of a kernel's outputs and written tensors if its inputs are known and small."""
    outs = [leaf for leaf in tensors_in((out,)) if isinstance(leaf, FakeTensor)]
    changed = _written(func, args, kwargs)
    if not outs and not changed:
        return
    values = None if _is_random(func) else _values(args, kwargs)
    if values is None or any(tensor.numel() > _LARGEST for tensor in (*outs, *changed)):
        for tensor in changed:
            forget(tensor)
        return
    real = _computed(
        func, *tree_map_only(Tensor, lambda tensor: values[id(tensor)], (tuple(args), dict(kwargs)))
    )
    for tensor, value in zip(outs, tensors_in((real,)), strict=True):
        know(tensor, value)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among a kernel's arguments or results, in order, also in nested lists, tuples and dicts.

    Called several times per kernel; torch's tree_leaves takes four times as long.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def _values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Tensor] | None:
    """Known values of a kernel's inputs by tensor id; None if any input is unknown."""
    values: dict[int, Tensor] = {}
    for tensor in tensors_in((*args, *kwargs.values())):
        value = known(tensor)
        if value is None:
            return None
        values[id(tensor)] = value
    return values


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that a kernel writes, by its schema."""
    places = _written_places(func)
    return list(
        tensors_in(kwargs.get(name, args[place] if place < len(args) else None) for place, name in places)
    )


@cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that a kernel writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (place, argument.name)
        for place, argument in arguments
        if argument.alias_info and argument.alias_info.is_write
    )


@cache
def _is_random(func: Any) -> bool:
    """Whether a kernel returns random numbers or uninitialized memory."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name()


def _computed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("device") is not None:
        kwargs["device"] = _CPU
    with unset_fake_temporarily(), torch.no_grad():
        return func(*args, **kwargs)


aten = torch.ops.aten


class ShapesFromValues:
    """Fake results of kernels whose shapes depend on values: ``nonzero``, boolean indexing,
    ``masked_select``, ``bincount``, ``repeat_interleave``. The meter calls ``answer`` before torch's fake
    kernels. ``read`` is called first with the tensor whose values decide the shape: on a GPU the host waits.
    """

    def __init__(self, read: Callable[[Tensor, str], None]) -> None:
        self._read = read
        self._selected: int | None = None

    @contextmanager
    def selecting(self, count: int) -> Iterator[None]:
        """Context manager in which a mask of unknown values selects ``count`` entries, without a wait."""
        self._selected = count
        try:
            yield
        finally:
            self._selected = None

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Fake result of a kernel with a data-dependent shape; None for any other kernel."""
        if func is aten.nonzero.default:
            return self._nonzero(args[0])
        if func is aten.index.Tensor and any(_is_mask(index) for index in args[1]):
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
        return _fake(values.nonzero, tensor.device)

    def _by_mask(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        mask, *rest = indices
        if mask is None or any(index is not None for index in rest):
            raise NotImplementedError("a boolean mask beside other indices")
        if mask.device != tensor.device and mask.device.type != "cpu":
            raise RuntimeError(f"indices on {mask.device} of a tensor on {tensor.device}")
        if self._selected is not None and known(mask) is None:
            return torch.empty((self._selected,), dtype=tensor.dtype, device=tensor.device)
        values, source = self._values(mask, "boolean indexing"), known(tensor)
        if values is not None and source is not None:
            return _fake(lambda: source[values], tensor.device)
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
        return _fake(lambda: func(values, minlength=least), args[0].device)

    def _repeats(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        values = self._values(args[0], "repeat_interleave")
        if values is None:
            raise NotImplementedError("repeat_interleave by counts that only the model knows")
        return _fake(lambda: func(values, **kwargs), args[0].device)

    def _values(self, tensor: Tensor, what: str) -> Tensor | None:
        self._read(tensor, what)
        return known(tensor)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _fake(compute: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Fake tensor on ``device`` with the shape and values of ``compute``'s real result."""
    with unset_fake_temporarily():
        value = compute()
    fake = torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
    know(fake, value)
    return fake
