"""The KV cache of the embedded engine, which grows by blocks of tokens; ``Decoding`` has one for its batch.

``DynamicCache`` copies all its keys and values to append one token: half the time of a decode step of a small
model at batch 256. Here a layer allocates ``BLOCK`` tokens at a time, and copies only when it is full.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

BLOCK = 64
"""Tokens that are allocated at a time."""


def block_cache(model_config: Any) -> DynamicCache:
    """An empty KV cache for a model; sliding-window layers keep transformers' own kind."""
    cache = DynamicCache(config=model_config)
    cache.layers = [BlockLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class BlockLayer(DynamicLayer):  # type: ignore[misc]
    """The KV cache of one layer, as transformers calls it.

    ``keys``, ``values`` [batch, kv_heads, tokens, head_dim] are views of larger buffers. Made by
    ``block_cache`` for ``Decoding``.
    """

    keys: Tensor
    values: Tensor
    key_room: Tensor | None = None
    value_room: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        self.key_room, self.keys = _append(self.key_room, self.keys, key_states, start)
        self.value_room, self.values = _append(self.value_room, self.values, value_states, start)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch."""
        super().batch_select_indices(indices)
        self.key_room = self.value_room = None


def _append(room: Tensor | None, past: Tensor, new: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Write ``new`` after the ``start`` tokens of ``past``; returns the buffer and its filled part."""
    end = start + new.shape[-2]
    if room is None or room.shape[-2] < end:
        batch, heads, _, head_dim = new.shape
        room = torch.empty(batch, heads, end + BLOCK, head_dim, dtype=new.dtype, device=new.device)
        if start:
            room[:, :, :start] = past
    room[:, :, start:end] = new
    return room, room[:, :, :end]
