"""Weight conversion: Hugging Face tensors to megatron parameters and back, whole or as shards of TP ranks.

The *global* parameter is that of TP 1. All follow ``parameter_map.py`` and only move values, so a round trip
is exact to the bit. ``shard_parts`` says which rows and columns of the HF tensors a shard is made of, so that
a rank reads no others. Used by ``policy/bit_digest.py``,
``policy/weight_map.py`` and ``benchmarks/dcp_convert.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_megatron.hf.parameter_map import Mapping


def join(mapping: Mapping, tensors: Sequence[Tensor]) -> Tensor:
    """Join HF tensors into the global parameter, of shape ``mapping.shape``."""
    return _cat([tensors[s.source].narrow(0, s.row, s.rows) for s in mapping.segments], 0)


def split(mapping: Mapping, value: Tensor) -> tuple[Tensor, ...]:
    """Split the global parameter ``value`` into its HF tensors; views of it where rows are consecutive."""
    rows = value.split([segment.rows for segment in mapping.segments])
    pieces: list[list[Tensor]] = [[] for _ in mapping.hf_names]
    for segment, piece in zip(mapping.segments, rows, strict=True):
        pieces[segment.source].append(piece)
    return tuple(_cat(parts, 0) for parts in pieces)


def shard(mapping: Mapping, value: Tensor, rank: int, size: int) -> Tensor:
    """Cut the global parameter for TP rank ``rank`` of ``size``."""
    if mapping.tp_dim is None or size == 1:
        return value
    parts = value.chunk(mapping.tp_parts, mapping.tp_dim)
    return _cat([part.chunk(size, mapping.tp_dim)[rank] for part in parts], mapping.tp_dim)


class Part(NamedTuple):
    """Part of an HF tensor that a rank's shard is made of: a slice of its rows and columns."""

    source: int
    """Index of the HF tensor among the parameter's."""
    rows: slice
    columns: slice = slice(None)


def shard_parts(mapping: Mapping, rank: int, size: int) -> Iterator[Part]:
    """Parts of HF tensors that stack up to the shard of TP rank ``rank`` of ``size``."""
    if mapping.tp_dim == 1:
        width = mapping.shape[1] // size
        for segment in mapping.segments:
            rows = slice(segment.row, segment.row + segment.rows)
            yield Part(segment.source, rows, slice(rank * width, (rank + 1) * width))
        return
    parts, ranks, own = (1, 1, 0) if mapping.tp_dim is None else (mapping.tp_parts, size, rank)
    height = mapping.shape[0] // parts // ranks
    for part in range(parts):
        begin = (part * ranks + own) * height
        yield from _rows(mapping, begin, begin + height)


def _rows(mapping: Mapping, begin: int, end: int) -> Iterator[Part]:
    """The rows ``begin`` to ``end`` of the global parameter, as rows of its HF tensors."""
    above = 0
    for segment in mapping.segments:
        first, last = max(begin, above), min(end, above + segment.rows)
        if first < last:
            yield Part(segment.source, slice(segment.row + first - above, segment.row + last - above))
        above += segment.rows


def unshard(mapping: Mapping, pieces: Sequence[Tensor]) -> Tensor:
    """Join the shards of all TP ranks, in rank order, into the global parameter."""
    if mapping.tp_dim is None or len(pieces) == 1:
        return pieces[0]
    dim = mapping.tp_dim
    parts = zip(*(piece.chunk(mapping.tp_parts, dim) for piece in pieces), strict=True)
    return torch.cat([piece for part in parts for piece in part], dim)  # one copy of the whole, not two


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The concatenation, without a copy where there is one tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
