"""Constant propagation: fake tensors that follow from host data keep their real values, if small.

The meter calls it after each kernel. A pack's tokens, masks, bounds and positions are known, and everything
computed from them; hidden states are not. So a data-dependent shape (``nonzero`` of a mask) is exact if the
program's own data decide it. Results of the model's arithmetic are guessed as ones, which are finite,
positive and true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

_LARGEST = 1 << 17
"""Elements of the largest tensor whose values are kept: longer than the longest pack."""
_CPU = torch.device("cpu")
_NAME = "_known"  # an attribute: nn.Module.to refuses tensors that a weak dictionary refers to
_STALE = "_stale"


def known(tensor: Tensor) -> Tensor | None:
    """Values of a tensor, on the CPU, if they follow from host data alone; else None."""
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


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a kernel writes into, by its schema."""
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[number] if number < len(args) else None)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def propagate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Compute the values of a kernel's outputs and written tensors, if its inputs are known and small."""
    outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
    changed = written(func, args, kwargs)
    if not outs and not changed:
        return
    inputs = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    values = {id(one): known(one) for one in inputs}
    if not _follows(func, inputs, values) or any(one.numel() > _LARGEST for one in (*outs, *changed)):
        for one in changed:
            forget(one)
        return
    real = _computed(func, *tree_map_only(Tensor, lambda one: values[id(one)], (tuple(args), dict(kwargs))))
    results = [leaf for leaf in tree_leaves(real) if isinstance(leaf, Tensor)]
    for one, value in zip(outs, results, strict=True):
        know(one, value)


def _follows(func: Any, inputs: list[Tensor], values: Mapping[int, Tensor | None]) -> bool:
    """Whether a kernel's results follow from known values: no random numbers, no uninitialized memory."""
    if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name():
        return False
    return all(values[id(one)] is not None for one in inputs)


def _computed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("device") is not None:
        kwargs["device"] = _CPU
    with unset_fake_temporarily(), torch.no_grad():
        return func(*args, **kwargs)
