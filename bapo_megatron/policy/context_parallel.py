"""Context parallelism with load balancing: the sharding of a pack's tokens over CP ranks.

    rank r of C holds chunks r and 2C - 1 - r of each document, which is cut into 2C chunks of equal length

Under a causal mask early chunks are cheap and late ones expensive: every rank has the same work (as in Llama
3, arXiv 2407.21783, Sec. 3.3.2, and Transformer Engine).

Index arithmetic without communication, for ``passes.py`` and the attention in torch. ValueError for a
document that cannot be cut evenly: the packing pads documents (``PackLayout.document_multiple``).

Shapes: ``_T`` tokens of a pack, ``_L`` tokens of a pack on this rank (T / size). Used in ``planning/`` and
this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from bapo_megatron.tensor_types import MicroBatch


@dataclass(frozen=True)
class DocumentChunk:
    """A rank's chunk of a packed document: its queries, and the range of keys that they attend to."""

    queries: int
    """Number of tokens of the chunk."""
    first_key: int
    """Position in the pack of the document's first token."""
    last_key: int
    """Position after the chunk's last token. The chunk's tokens are the last ``queries`` keys."""


def document_chunks(bounds: tuple[int, ...], size: int, rank: int) -> Iterator[DocumentChunk]:
    """The chunks of documents ``bounds[d]:bounds[d + 1]`` on ``rank``, in its order.

    At size 1 a document is one chunk. ValueError if a document cannot be cut evenly.
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


@lru_cache(maxsize=64)  # every layer of a micro-batch needs the same ones
def positions(bounds: tuple[int, ...], size: int, rank: int) -> Tensor:
    """Positions [L] in the pack of the tokens on ``rank``, in its order."""
    parts = [torch.arange(s.last_key - s.queries, s.last_key) for s in document_chunks(bounds, size, rank)]
    return torch.cat(parts)


@lru_cache(maxsize=16)
def gathered_rows(bounds: tuple[int, ...], size: int) -> Tensor:
    """Rows [T]: for each position of the pack its row in the concatenation of all ranks' tokens."""
    held = torch.cat([positions(bounds, size, rank) for rank in range(size)])
    return torch.empty_like(held).scatter_(0, held, torch.arange(held.numel()))


def slice_batch(batch: MicroBatch, size: int, rank: int) -> MicroBatch:
    """The part of a pack on ``rank``; fields that are no columns still describe the whole pack."""
    if size == 1:
        return batch
    return batch.take(positions(batch.cu_seqlens, size, rank))
