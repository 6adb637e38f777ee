"""The weight map: the pipeline stage of each parameter."""

from __future__ import annotations

import pytest

from bapo_megatron.policy.weight_map import stage_of

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
def test_layer_chunks_are_assigned_to_stages_in_turn(
    stages: int, chunks: list[int], expected: list[int]
) -> None:
    assert [stage_of((WEIGHT, layer), chunks, stages) for layer in range(8)] == expected


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("embedding.word_embeddings.weight", 0),
        ("decoder.final_layernorm.weight", 3),
        ("output_layer.weight", 3),
    ],
)
def test_embedding_is_on_the_first_stage_and_head_on_the_last(name: str, stage: int) -> None:
    assert stage_of((name, None), [2] * 4, 4) == stage
