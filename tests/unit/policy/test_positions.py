"""Positions: tokens of each context-parallel rank, causal work, RoPE."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from bapo_megatron.policy.positions import (
    DocumentChunk,
    Rotary,
    RotaryTable,
    document_chunks,
    gathered_rows,
    positions,
    rotate,
)
from tests.support.models import _LLAMA_ROPE

DIM = 16
SCALINGS = {
    "plain": ({"rope_type": "default", "rope_theta": 1e6}, Rotary(DIM, 1e6, None)),
    "llama3": (_LLAMA_ROPE, Rotary(DIM, 500000.0, 32.0)),
}


def test_documents_of_ranks_by_hand() -> None:
    """A document of 8 tokens in chunks of 2 (rank 0: first and last), then one of 4 in chunks of 1. One rank
    holds documents whole."""
    assert positions((0, 8, 12), 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert positions((0, 8, 12), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert positions((0, 3, 3, 8), 1, 0).tolist() == list(range(8))
    chunks = [(2, 0, 4), (2, 0, 6), (1, 8, 10), (1, 8, 11)]
    assert list(document_chunks((0, 8, 12), 2, 1)) == [DocumentChunk(*one) for one in chunks]
    whole = [(3, 0, 3), (0, 3, 3), (5, 3, 8)]
    assert list(document_chunks((0, 3, 3, 8), 1, 0)) == [DocumentChunk(*one) for one in whole]
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


def heads(tokens: int, count: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, count, DIM, generator=torch.Generator().manual_seed(seed))


def test_rotation_by_hand() -> None:
    """d = 4 and base 100: frequencies 1 and 1/10. At position 2 the pairs turn by 2 and by 0.2."""
    x = torch.tensor([[[1.0, 0.0, 0.0, 3.0]]])
    turned = rotate(x, Rotary(4, 100.0, None).table(torch.tensor([2])))
    expected = [math.cos(2), -3 * math.sin(0.2), math.sin(2), 3 * math.cos(0.2)]
    assert turned.flatten().tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", SCALINGS)
def test_equals_hugging_face(kind: str) -> None:
    """To the bit in float32."""
    parameters, rotary = SCALINGS[kind]
    config = LlamaConfig(hidden_size=4 * DIM, num_attention_heads=4, rope_parameters=parameters)
    place = torch.tensor([0, 1, 2, 900, 8191, 40_000, 65_535])
    x = heads(len(place))
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(x, place[None])
    theirs, _ = modeling_llama.apply_rotary_pos_emb(*(2 * (x[None].transpose(1, 2),)), cos, sin)
    assert torch.equal(rotate(x, rotary.table(place)), theirs.transpose(1, 2)[0])


def test_bfloat16_is_rounded_once() -> None:
    place, x = torch.arange(3000), heads(3000).bfloat16()
    table = SCALINGS["plain"][1].table(place)
    assert torch.equal(rotate(x, table), rotate(x.float(), table).bfloat16())


def test_a_table_is_kept_once_for_all_layers() -> None:
    """The backward pass keeps cosines and sines, and no copy of queries or keys."""
    table = Rotary(DIM, 1e4, None).table(torch.arange(6))
    assert isinstance(table, RotaryTable)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        for layer in range(3):
            rotate(heads(6, seed=layer).requires_grad_(), table)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in table}
