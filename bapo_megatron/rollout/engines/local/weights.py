"""Atomic weight replacement of the embedded engine's model: stage and check all tensors, then commit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.hf.weight_check import checked_weights


class ModelWeights:
    """The parameters of a Hugging Face model by name; tied ones count once.

    ``stage`` copies and checks new ones, ``commit`` replaces the old. Made by ``LocalModel``, which does the
    locking.
    """

    def __init__(self, model: Any) -> None:
        self._own: dict[str, Tensor] = dict(model.named_parameters())
        names = {id(tensor): name for name, tensor in self._own.items()}
        every = dict(model.named_parameters(remove_duplicate=False))
        self._aliases = {name: names[id(every[name])] for name in every.keys() - self._own.keys()}

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies of new weights in the model's dtype and device. ValueError if names or shapes differ."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._own.items()}
        return {
            name: tensor.detach().to(self._own[name].device, self._own[name].dtype, copy=True)
            for name, tensor in checked_weights(weights, shapes, self._aliases)
        }

    @torch.no_grad()
    def commit(self, staged: dict[str, Tensor]) -> None:
        """Copy staged weights into the model."""
        for name, tensor in staged.items():
            self._own[name].copy_(tensor)

    def release(self) -> None:
        """Drop the references to the model's parameters."""
        self._own.clear()
