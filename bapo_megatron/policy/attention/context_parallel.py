"""Context parallelism with balanced load: which tokens of a pack a rank holds, and what they see.

Each document is cut into ``2 x size`` chunks of equal length; rank r holds chunks r and
``2 x size - 1 - r``. Under a causal mask an early chunk is cheap and a late one dear, so every rank has the
same work (the load balancing of Llama 3, arXiv 2407.21783, Sec. 3.3.2, and of Transformer Engine).

Shapes: ``_T`` tokens of a pack, ``_L`` tokens of a pack on this rank (T / size).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from bapo_megatron.types import MicroBatch


@dataclass(frozen=True)
class DocumentChunk:
    """A rank's chunk of a packed document under CP: its queries, and the keys that they attend to."""

    queries: int
    """Tokens of the chunk."""
    first_key: int
    """Position in the pack of the document's first token."""
    last_key: int
    """Position after the chunk's last token. The chunk's tokens are the last ``queries`` keys."""


def document_chunks(bounds: tuple[int, ...], size: int, rank: int) -> Iterator[DocumentChunk]:
    """The chunks that ``rank`` holds of documents ``bounds[d]:bounds[d + 1]``, in the order it holds them.

    Without context parallelism a document is one chunk. ValueError if a document cannot be cut evenly.
    """
    for start, end in pairwise(bounds):
        if size == 1:
            yield DocumentChunk(end - start, start, end)
            continue
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise ValueError(f"a document of {end - start} tokens cannot be cut into 2 x {size} chunks")
        for number in (rank, 2 * size - 1 - rank):
            yield DocumentChunk(chunk, start, start + (number + 1) * chunk)


@lru_cache(maxsize=64)  # every layer of a micro-batch asks for the same ones
def positions(bounds: tuple[int, ...], size: int, rank: int) -> Tensor:
    """Positions [L] of the pack that ``rank`` holds, in the order it holds them."""
    parts = [torch.arange(s.last_key - s.queries, s.last_key) for s in document_chunks(bounds, size, rank)]
    return torch.cat(parts)


@lru_cache(maxsize=16)
def gathered_rows(bounds: tuple[int, ...], size: int) -> Tensor:
    """For each position [T] of the pack its row in the concatenation of all ranks' tokens."""
    held = torch.cat([positions(bounds, size, rank) for rank in range(size)])
    return torch.empty_like(held).scatter_(0, held, torch.arange(held.numel()))


def slice_batch(batch: MicroBatch, size: int, rank: int) -> MicroBatch:
    """The part of a pack that ``rank`` holds; what is no column still describes the whole pack."""
    if size == 1:
        return batch
    return batch.take(positions(batch.cu_seqlens, size, rank))
