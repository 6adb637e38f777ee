"""Replacing a model's weights as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class ModelWeights:
    """The parameters of a Hugging Face model under their names; tied ones count once."""

    def __init__(self, model: Any) -> None:
        self._own: dict[str, Tensor] = dict(model.named_parameters())
        names = {id(tensor): name for name, tensor in self._own.items()}
        every = dict(model.named_parameters(remove_duplicate=False))
        self._aliases = {name: names[id(every[name])] for name in every.keys() - self._own.keys()}

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies of all tensors of ``weights``, in the model's type and place. The model is not touched.

        The second name of a tied tensor (``lm_head.weight``) may be absent. Raises ValueError for a tensor
        that is unknown, given twice, of another shape, or missing.
        """
        staged: dict[str, Tensor] = {}
        for name, tensor in weights:
            target = self._target(name, tensor)
            if name in staged:
                raise ValueError(f"weight {name} was given twice")
            staged[name] = tensor.detach().to(target.device, target.dtype, copy=True)
        self._drop_aliases(staged)
        if missing := sorted(self._own.keys() - staged.keys()):
            raise ValueError(f"{len(missing)} weights are missing: {', '.join(missing[:5])}")
        return staged

    def _target(self, name: str, tensor: Tensor) -> Tensor:
        target = self._own.get(self._aliases.get(name, name))
        if target is None:
            raise ValueError(f"the model has no weight {name}")
        if tensor.shape != target.shape:
            shapes = f"{list(tensor.shape)}; the model's is {list(target.shape)}"
            raise ValueError(f"weight {name} has shape {shapes}")
        return target

    def _drop_aliases(self, staged: dict[str, Tensor]) -> None:
        for alias, name in self._aliases.items():
            given = staged.pop(alias, None)
            if given is not None and name in staged and not torch.equal(given, staged[name]):
                raise ValueError(f"weights {alias} and {name} differ, but the model ties them")

    @torch.no_grad()
    def commit(self, staged: dict[str, Tensor]) -> None:
        """Write what ``stage`` returned into the model."""
        for name, tensor in staged.items():
            self._own[name].copy_(tensor)

    def release(self) -> None:
        """Forget the model."""
        self._own.clear()
