"""The shapes of Qwen3 and of Qwen2.5-7B-Instruct in recipes/shapes: facts of the published models.

And how transformers reads them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import model_shape, read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from tests.support.cluster_recipes import FOLDER

SHAPES = FOLDER / "shapes"
# Layers, heads, KV heads, tied: Table 1 of the reports (arXiv 2505.09388, 2412.15115). RoPE's base and
# positions: the models' config.json. Tensors and bytes in bfloat16: total_size of their
# model.safetensors.index.json.
PUBLISHED = {
    "Qwen3-4B-Instruct-2507": (36, 32, 8, True, 5e6, 262144, 398, 8_044_936_192),
    "Qwen3-8B": (36, 32, 8, False, 1e6, 40960, 399, 16_381_470_720),
    "Qwen2.5-7B-Instruct": (28, 28, 4, False, 1e6, 32768, 339, 15_231_233_024),
    "Qwen3-32B": (64, 64, 8, False, 1e6, 40960, 707, 65_524_246_528),
}


def found(path: Path, **changes: object) -> tuple[object, ...]:
    """The published facts, as we read them of a config.json."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    shape = model_shape(config, "test")
    tensors = hf_tensors(shape)
    return (
        *(shape.layers, shape.heads, shape.kv_heads, shape.tied, shape.rope_theta, shape.max_positions),
        *(len(tensors), 2 * sum(map(math.prod, tensors.values()))),
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_is_what_was_published(name: str) -> None:
    assert found(SHAPES / name) == PUBLISHED[name]


@pytest.mark.parametrize(
    "mistake",
    [{"num_key_value_heads": 4}, {"head_dim": 80}, {"head_dim": None}, {"tie_word_embeddings": False}],
)
def test_the_bytes_alone_show_a_mistake(mistake: dict[str, object]) -> None:
    """80 is what hidden size and heads would give, and what a reader takes that passes over head_dim."""
    name = "Qwen3-4B-Instruct-2507"
    assert found(SHAPES / name, **mistake)[-1] != PUBLISHED[name][-1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_makes_the_same_tensors_of_it(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(SHAPES / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    assert hf_tensors(read_model_shape(SHAPES / name)) == theirs
    assert config.rope_parameters["rope_theta"] == PUBLISHED[name][4]


def test_a_model_with_biases_is_refused() -> None:
    """Qwen3 has norms of queries and keys in place of Qwen2's biases."""
    with pytest.raises(ConfigError, match="attention_bias=True is not supported"):
        found(SHAPES / "Qwen3-8B", attention_bias=True)
