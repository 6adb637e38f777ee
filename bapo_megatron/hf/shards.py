"""Weight conversion: Hugging Face tensors to megatron parameters and back, whole or as shards of TP ranks.

``join`` turns HF tensors into the *global* parameter (as if TP were 1), ``split`` turns it back; ``shard``
cuts the global parameter for one TP rank, ``unshard`` is its inverse. All follow ``parameter_map.py`` and
only move values, so a round trip is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.hf.parameter_map import Mapping


def join(mapping: Mapping, tensors: Sequence[Tensor]) -> Tensor:
    """The global parameter, of shape ``mapping.shape``, from its HF tensors."""
    return _cat([tensors[s.source].narrow(0, s.row, s.rows) for s in mapping.segments], 0)


def split(mapping: Mapping, value: Tensor) -> tuple[Tensor, ...]:
    """The HF tensors of the global parameter ``value``; views of it where their rows are consecutive."""
    rows = value.split([segment.rows for segment in mapping.segments])
    pieces: list[list[Tensor]] = [[] for _ in mapping.hf_names]
    for segment, piece in zip(mapping.segments, rows, strict=True):
        pieces[segment.source].append(piece)
    return tuple(_cat(parts, 0) for parts in pieces)


def shard(mapping: Mapping, value: Tensor, rank: int, size: int) -> Tensor:
    """The shard of the global parameter that TP rank ``rank`` of ``size`` holds."""
    if mapping.tp_dim is None or size == 1:
        return value
    parts = value.chunk(mapping.tp_parts, mapping.tp_dim)
    return _cat([part.chunk(size, mapping.tp_dim)[rank] for part in parts], mapping.tp_dim)


def unshard(mapping: Mapping, pieces: Sequence[Tensor]) -> Tensor:
    """The global parameter from the shards of all TP ranks, in rank order."""
    if mapping.tp_dim is None or len(pieces) == 1:
        return pieces[0]
    dim = mapping.tp_dim
    parts = zip(*(piece.chunk(mapping.tp_parts, dim) for piece in pieces), strict=True)
    return torch.cat([piece for part in parts for piece in part], dim)  # one copy of the whole, not two


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The concatenation, without a copy where there is one tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
