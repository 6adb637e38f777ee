"""Token positions of a pack: the tokens on a context-parallel rank, and their rotary embedding.

**Context parallelism** with load balancing shards a pack's tokens over CP ranks:

    rank r of C holds chunks r and 2C - 1 - r of each document, which is cut into 2C chunks of equal length

``slice_batch`` returns a rank's part of a pack, ``positions`` its indices, ``gathered_rows`` the way back.
Under a causal mask early chunks are cheap and late ones expensive, so every rank has the same work (as in
Llama 3, arXiv 2407.21783, Sec. 3.3.2, and Transformer Engine). This is index arithmetic without
communication. A document that cannot be cut evenly raises ValueError: the packing pads documents
(``PackLayout.document_multiple``).

**Rotary position embedding** (RoPE) of ``thd`` packs in float32, for layers without Transformer Engine:
``rotate(x, Rotary.table(positions))`` returns

    y_i       = x_i cos(m f_i) - x_{i+d/2} sin(m f_i)
    y_{i+d/2} = x_{i+d/2} cos(m f_i) + x_i sin(m f_i)          f_i = base^(-2 i / d)

for entries i and i + d/2 of a head's first d (all, in most models), at position m in its document (Su et al.
2021, RoFormer, arXiv 2104.09864; halves, not neighbours, as in Hugging Face's models). The cosines are
computed once per pack for all layers. megatron-core's own code for packs would round them to bfloat16,
compute them in every layer for queries and keys, and synchronize with the device each time for the document
lengths.

Shapes: ``_T`` tokens of a pack, ``_L`` tokens of a pack on this rank (T / size), ``_LHD`` [tokens, heads, d],
``_F`` frequencies (d / 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bapo_megatron.tensor_types import MicroBatch

# Llama 3's frequency scaling (transformers.modeling_rope_utils): divides frequencies of wavelengths above
# 8192 by the factor, keeps those below 8192 / 4, interpolates between. hf/config.py refuses other schemes.
_TRAINED_POSITIONS, _HIGH_FREQUENCY = 8192, 4


@dataclass(frozen=True)
class DocumentChunk:
    """A CP rank's chunk of a packed document: number of queries, pack positions of their keys."""

    queries: int
    first_key: int
    """Position in the pack of the document's first token."""
    last_key: int
    """Position after the chunk's last token. The chunk's tokens are the last ``queries`` keys."""


def document_chunks(bounds: tuple[int, ...], size: int, rank: int) -> Iterator[DocumentChunk]:
    """Yield the chunks of documents ``bounds[d]:bounds[d + 1]`` on ``rank``, in its order. At size 1 a
    document is one chunk. Raises ValueError if a document cannot be cut evenly."""
    for start, end in pairwise(bounds):
        if size == 1:
            yield DocumentChunk(end - start, start, end)
            continue
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise ValueError(f"a document of {end - start} tokens cannot be cut into 2 x {size} chunks")
        for number in (rank, 2 * size - 1 - rank):
            yield DocumentChunk(chunk, start, start + (number + 1) * chunk)


@lru_cache(maxsize=64)  # shared by all layers of a micro-batch
def positions(bounds: tuple[int, ...], size: int, rank: int) -> Tensor:
    """Pack positions [L] of the tokens on ``rank``, in its order."""
    parts = [torch.arange(s.last_key - s.queries, s.last_key) for s in document_chunks(bounds, size, rank)]
    return torch.cat(parts)


@lru_cache(maxsize=16)
def gathered_rows(bounds: tuple[int, ...], size: int) -> Tensor:
    """[T]: the row of each pack position in the concatenation of all ranks' tokens."""
    order = torch.cat([positions(bounds, size, rank) for rank in range(size)])
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))


def slice_batch(batch: MicroBatch, size: int, rank: int) -> MicroBatch:
    """The part of a pack on ``rank``; non-column fields still describe the whole pack."""
    if size == 1:
        return batch
    return batch.take(positions(batch.cu_seqlens, size, rank))


class RotaryTable(NamedTuple):
    """Cosines and sines of a pack's tokens, float32, both [tokens, d / 2]."""

    cos_LF: Tensor
    sin_LF: Tensor


@dataclass(frozen=True)
class Rotary:
    """RoPE parameters of a model; ``table`` computes a pack's cosines and sines."""

    head_dim: int
    """Number of rotated entries of a head, the first ones."""
    base: float
    factor: float | None
    """Factor of Llama 3's frequency scaling, or None."""

    def table(self, position_L: Tensor) -> RotaryTable:
        """The table for tokens at document positions [L], on the positions' device."""
        angle_LF = torch.outer(position_L.float(), _frequencies(self, position_L.device))
        return RotaryTable(angle_LF.cos(), angle_LF.sin())


@lru_cache(maxsize=16)
def _frequencies(rotary: Rotary, device: torch.device) -> Tensor:
    """The frequencies f, float32 [d / 2], computed in float32 as engines do."""
    even = torch.arange(0, rotary.head_dim, 2, dtype=torch.float32)
    frequency_F = 1.0 / (rotary.base ** (even / rotary.head_dim))
    if rotary.factor is not None:
        frequency_F = _scaled(frequency_F, rotary.factor)
    return frequency_F.to(device)


def _scaled(frequency_F: Tensor, factor: float) -> Tensor:
    wavelength_F = 2 * math.pi / frequency_F
    low_F = torch.where(wavelength_F > _TRAINED_POSITIONS, frequency_F / factor, frequency_F)
    smooth_F = (_TRAINED_POSITIONS / wavelength_F - 1) / (_HIGH_FREQUENCY - 1)
    between_F = (1 - smooth_F) * low_F / factor + smooth_F * low_F
    shortest = _TRAINED_POSITIONS / _HIGH_FREQUENCY
    return torch.where((wavelength_F >= shortest) & (wavelength_F <= _TRAINED_POSITIONS), between_F, low_F)


def rotate(x_LHD: Tensor, table: RotaryTable) -> Tensor:
    """Rotate queries or keys in float32, rounded once to their own dtype."""
    rotated: Tensor = _Rotation.apply(x_LHD, *table)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """Autograd function of ``rotate``, with the inverse rotation as backward; saves only the pack's table."""

    @staticmethod
    def forward(ctx: Any, x_LHD: Tensor, cos_LF: Tensor, sin_LF: Tensor) -> Tensor:
        ctx.save_for_backward(cos_LF, sin_LF)
        return _rotated(x_LHD, cos_LF, sin_LF)

    @staticmethod
    def backward(ctx: Any, grad_LHD: Tensor) -> tuple[Tensor, None, None]:
        cos_LF, sin_LF = ctx.saved_tensors
        return _rotated(grad_LHD, cos_LF, -sin_LF), None, None


def _rotated(x_LHD: Tensor, cos_LF: Tensor, sin_LF: Tensor) -> Tensor:
    cos, sin = cos_LF[:, None], sin_LF[:, None]
    half = cos_LF.size(1)
    first, second, rest = x_LHD.float().split([half, half, x_LHD.size(-1) - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x_LHD.dtype)
