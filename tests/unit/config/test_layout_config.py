"""Layouts of a recipe: which of them a model fits into, and the layers of their stages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bapo_megatron.config import ParallelConfig
from bapo_megatron.config.validation import parallel_problems
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.layers.mlp import Experts
from bapo_megatron.policy.layout import chunk_layers, data_parallel_size, layout_problems, stage_kinds
from tests.support.cluster_recipes import FOLDER
from tests.support.shapes import resized

SHAPE = read_model_shape(FOLDER / "shapes/DeepSeek-R1-Distill-Qwen-7B")


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "listed", "chunks", "stages"),
    [
        (94, 4, 1, (), (23, 24, 24, 23), [23, 24, 24, 23]),  # Qwen3-235B-A22B
        (94, 4, 2, (), (11, 12, 12, 12, 12, 12, 12, 11), [23, 24, 24, 23]),
        (28, 8, 1, (), (3, 3, 3, 4, 4, 4, 4, 3), [3, 3, 3, 4, 4, 4, 4, 3]),
        (7, 2, 2, (), (2, 2, 2, 1), [4, 3]),
        (10, 2, 2, (1, 4, 2, 3), (1, 4, 2, 3), [3, 7]),
    ],
)
def test_layers_of_chunks_and_stages(
    layers: int, pipeline: int, virtual: int, listed: tuple[int, ...], chunks: Any, stages: list[int]
) -> None:
    """Layers that the chunks do not divide are spread; listed ones are taken as they are."""
    parallel = ParallelConfig(pipeline=pipeline, virtual=virtual, pipeline_layers=listed)
    assert chunk_layers(parallel, layers) == chunks
    shape = resized(SHAPE, layers=layers)
    assert [kinds[shape.attention] for kinds in stage_kinds(parallel, shape)] == stages
    assert not list(layout_problems(parallel, shape))


EXPERTS = resized(SHAPE, experts=Experts(count=6, per_token=2, ffn=40, normalized=True))


@pytest.mark.parametrize(
    ("parallel", "shape", "message"),
    [
        ({"pipeline": 2, "virtual": 2, "pipeline_layers": (4, 4, 4)}, None, "has 3 numbers.* give 4 numbers"),
        ({"pipeline": 2, "pipeline_layers": (28, 0)}, None, "pipeline_layers=28 0 leaves"),
        ({"expert": 2, "data": 2}, SHAPE, "2 x 1, but the model has no experts: leave both at 1"),
        ({"expert_tensor": 3, "data": 3}, EXPERTS, r"experts' width \(40\): use one of \[1, 2, 4, 5, 8,"),
        ({"tensor": 2}, EXPERTS, "needs sequence parallelism: set parallel.sequence=True"),
        ({"expert": 2, "data": 1}, EXPERTS, "tensor x context x data = 1 x 1 x 1 = 1$"),
        ({"expert": 3, "expert_tensor": 2, "data": 4}, EXPERTS, "3 x 2 does not divide the ranks"),
    ],
)
def test_a_layout_that_does_not_fit_is_named(
    parallel: dict[str, Any], shape: ModelShape | None, message: str
) -> None:
    config = ParallelConfig(**parallel)
    problems = layout_problems(config, shape) if shape else parallel_problems(config)
    assert re.search(message, "\n".join(problems))


def test_data_parallel_size() -> None:
    assert data_parallel_size(ParallelConfig(tensor=2, pipeline=2), None) == 1
    assert data_parallel_size(ParallelConfig(tensor=2, data=3), None) == 3
    assert data_parallel_size(ParallelConfig(tensor=2, pipeline=2), 16) == 4
    with pytest.raises(ConfigError, match="start a multiple of 4"):
        data_parallel_size(ParallelConfig(tensor=2, pipeline=2), 6)
    with pytest.raises(ConfigError, match="leave parallel.data out or start 8 processes"):
        data_parallel_size(ParallelConfig(tensor=2, data=4), 16)
