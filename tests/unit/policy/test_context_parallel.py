"""Context parallelism: the positions of each rank, and the balance of causal work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.data.packing import pack_samples
from bapo_megatron.policy.context_parallel import (
    DocumentChunk,
    document_chunks,
    gathered_rows,
    positions,
    slice_batch,
)
from bapo_megatron.types import COLUMNS, PackLayout
from tests.support.models import random_samples


def test_two_ranks_by_hand() -> None:
    """A document of 8 tokens in chunks of 2 (rank 0: first and last), then one of 4 in chunks of 1."""
    assert positions((0, 8, 12), 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert positions((0, 8, 12), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert list(document_chunks((0, 8, 12), 2, 1)) == [
        DocumentChunk(2, 0, 4),
        DocumentChunk(2, 0, 6),
        DocumentChunk(1, 8, 10),
        DocumentChunk(1, 8, 11),
    ]


def test_one_rank_holds_documents_whole() -> None:
    assert list(document_chunks((0, 3, 3, 8), 1, 0)) == [
        DocumentChunk(3, 0, 3),
        DocumentChunk(0, 3, 3),
        DocumentChunk(5, 3, 8),
    ]
    assert positions((0, 3, 3, 8), 1, 0).tolist() == list(range(8))


def test_an_odd_document_is_refused() -> None:
    with pytest.raises(ValueError, match="a document of 6 tokens cannot be cut into 2 x 2 chunks"):
        list(document_chunks((0, 6), 2, 0))


documents = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@given(documents, st.integers(2, 4))
def test_every_position_is_held_once_and_the_causal_work_is_equal(chunks: list[int], size: int) -> None:
    bounds = tuple(torch.tensor([0, *(2 * size * n for n in chunks)]).cumsum(0).tolist())
    held = [positions(bounds, size, rank) for rank in range(size)]
    assert torch.cat(held).sort().values.tolist() == list(range(bounds[-1]))
    work = {
        sum(s.queries * (s.last_key - s.first_key - s.queries) for s in document_chunks(bounds, size, rank))
        for rank in range(size)
    }
    assert len(work) == 1
    together = torch.cat(held)
    assert together[gathered_rows(bounds, size)].tolist() == list(range(bounds[-1]))


def test_every_column_of_a_pack_is_sliced_alike() -> None:
    """The rule that keeps parallelism out of the algorithm: index one field, index them all."""
    layout = PackLayout(document_multiple=4, length_multiple=4)
    [pack] = pack_samples(random_samples(5, seed=2), 400, layout=layout)
    held = positions(pack.cu_seqlens, 2, 1)
    part = slice_batch(pack, 2, 1)
    for name in COLUMNS:
        assert torch.equal(getattr(part, name), getattr(pack, name)[held]), name
    assert part.cu_seqlens == pack.cu_seqlens
    assert slice_batch(pack, 1, 0) is pack
