"""Positions: tokens of each context-parallel rank, causal work, RoPE; the pipeline stage of a parameter."""

from __future__ import annotations

import math
import types
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from bapo_megatron.data.packing import pack_samples
from bapo_megatron.policy.positions import (
    DocumentChunk,
    Rotary,
    RotaryTable,
    document_chunks,
    gathered_rows,
    positions,
    rotate,
    slice_batch,
)
from bapo_megatron.policy.weight_map import stage_of
from bapo_megatron.types import COLUMNS, PackLayout
from tests.support.models import _LLAMA_ROPE, random_samples

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


def megatron(x: torch.Tensor, bounds: tuple[int, ...], size: int, rank: int, scaled: bool) -> torch.Tensor:
    """megatron-core's rotation of a rank's tokens of a pack."""
    group = types.SimpleNamespace(size=lambda: size, rank=lambda: rank)
    embedding = RotaryEmbedding(
        DIM,
        1.0,
        rotary_base=500000.0 if scaled else 1000000.0,
        rope_scaling=scaled,
        rope_scaling_factor=32.0,
        use_cpu_initialization=True,
        cp_group=group,
    )
    longest = max(end - start for start, end in pairwise(bounds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        frequencies = embedding(longest, packed_seq=True)
    return rope_utils._apply_rotary_pos_emb_thd(x, torch.tensor(bounds), frequencies, cp_group=group)


def position_in_document(bounds: tuple[int, ...], size: int, rank: int) -> torch.Tensor:
    lengths = torch.tensor(bounds).diff().tolist()
    return torch.cat([torch.arange(length) for length in lengths])[positions(bounds, size, rank)]


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", SCALINGS)
def test_equals_megatron_in_float32_with_its_gradient(kind: str, size: int, rank: int) -> None:
    """To the bit, whole packs and the chunks of a context-parallel rank, one document or several."""
    for bounds in ((0, 8, 32, 4000), (0, 64)):
        place = position_in_document(bounds, size, rank)
        ours, theirs = (heads(len(place)).requires_grad_() for _ in range(2))
        rotated = rotate(ours, SCALINGS[kind][1].table(place))
        expected = megatron(theirs, bounds, size, rank, kind == "llama3")
        assert torch.equal(rotated, expected)
        weight = heads(len(place), seed=1)
        (rotated * weight).sum().backward()
        (expected * weight).sum().backward()
        assert torch.equal(ours.grad, theirs.grad)


def test_bfloat16_is_rounded_once() -> None:
    """megatron-core rounds cosines, products and their sum: its error is several times ours."""
    bounds = (0, 3000)
    place, x = torch.arange(3000), heads(3000).bfloat16()
    rotary = SCALINGS["plain"][1]
    exact = rotate(x.float(), rotary.table(place))
    ours = rotate(x, rotary.table(place))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, exact.bfloat16())
    error = (ours.float() - exact).abs().mean()
    assert (megatron(x, bounds, 1, 0, False).float() - exact).abs().mean() > 1.5 * error


def test_a_table_is_kept_once_for_all_layers() -> None:
    """The backward pass keeps cosines and sines, and no copy of queries or keys."""
    table = Rotary(DIM, 1e4, None).table(torch.arange(6))
    assert isinstance(table, RotaryTable)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        for layer in range(3):
            rotate(heads(6, seed=layer).requires_grad_(), table)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in table}


WEIGHT = "decoder.layers.{layer}.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("stages", "chunks", "expected"),
    [
        (1, [8], [0, 0, 0, 0, 0, 0, 0, 0]),
        (2, [4, 4], [0, 0, 0, 0, 1, 1, 1, 1]),
        (4, [2, 2, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3]),
        (3, [2, 5, 1], [0, 0, 1, 1, 1, 1, 1, 2]),
        # Interleaved: chunks of two layers, the first chunk of each stage, then the second of each.
        (2, [2, 2, 2, 2], [0, 0, 1, 1, 0, 0, 1, 1]),
        (2, [1] * 8, [0, 1, 0, 1, 0, 1, 0, 1]),
        (2, [1, 3, 2, 2], [0, 1, 1, 1, 0, 0, 1, 1]),
    ],
)
def test_chunks_go_to_stages_in_turn(stages: int, chunks: list[int], expected: list[int]) -> None:
    assert [stage_of((WEIGHT, layer), chunks, stages) for layer in range(8)] == expected


def test_embedding_is_on_the_first_stage_and_head_on_the_last() -> None:
    for name, stage in (
        ("embedding.word_embeddings", 0),
        ("decoder.final_layernorm", 3),
        ("output_layer", 3),
    ):
        assert stage_of((f"{name}.weight", None), [2] * 4, 4) == stage
