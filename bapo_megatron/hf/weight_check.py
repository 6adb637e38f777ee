"""Weight check: a stream of weights must have the model's Hugging Face names and shapes, tied copies apart.

For the weight sync by disk and the loads of the local engine: a generator in the stream. It raises ValueError
in the middle, or at the end, of the stream. Used by ``rollout/engines/local/engine.py`` and
``rollout/weight_sync/disk.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Check a stream of ``weights``; yields them without second names of tied tensors, which may be absent.

    ``aliases``: from a second name to the tensor's own. ValueError for a tensor that is unknown, given twice,
    of another shape, unlike the one that it is tied to, or (at the end) missing.
    """
    seen: set[str] = set()
    tied: dict[str, Tensor] = {}
    for name, tensor in weights:
        own = aliases.get(name, name)
        if own not in shapes:
            raise ValueError(f"the model has no weight {name}")
        if name in seen:
            raise ValueError(f"weight {name} was given twice")
        if tuple(tensor.shape) != shapes[own]:
            raise ValueError(
                f"weight {name} has shape {list(tensor.shape)}; the model's is {list(shapes[own])}"
            )
        seen.add(name)
        if own in aliases.values() and not torch.equal(_first(tied, own, tensor), tensor):
            raise ValueError(
                f"weight {name} differs from what the model ties it to: {own} and its other names"
            )
        if name == own:
            yield name, tensor
    if missing := sorted(shapes.keys() - seen):
        raise ValueError(f"{len(missing)} weights are missing: {', '.join(missing[:5])}")


def _first(tied: dict[str, Tensor], own: str, tensor: Tensor) -> Tensor:
    """The first of a tied tensor's copies."""
    if own not in tied:
        tied[own] = tensor.detach().clone()
    return tied[own]
