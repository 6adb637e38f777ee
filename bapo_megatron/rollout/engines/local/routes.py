"""Routes of the embedded engine: which experts a token takes, noted as transformers' routers choose them.

Used by ``decoding.py`` and ``model.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RouteRecorder:
    """A note of the last forward pass's routes, by a hook on each layer's router. For one thread at a time.

    Made by ``LocalModel``, read by ``Decoding`` after each call of the model.
    """

    def __init__(self, model: Any) -> None:
        self.is_on = False
        """Whether passes are noted: only while a request asks for routes."""
        self._noted: list[Tensor] = []
        routers = [one for one in model.modules() if type(one).__name__.endswith("TopKRouter")]
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, _router: Any, _input: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self.is_on:
            self._noted.append(output[2])

    def take(self, rows: int) -> Tensor:
        """The routes of the last position of each of the ``rows`` of the batch, [rows, layers, per_token]."""
        noted, self._noted = self._noted, []
        return torch.stack([chosen.view(rows, -1, chosen.shape[-1])[:, -1] for chosen in noted], 1)
