"""config.json: a mistake names its field, and what is left out is what transformers takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import model_shape, read_model_shape
from tests.support.checkpoint_models import config_of

CLASSES: dict[str, type[PreTrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "llama": LlamaConfig,
}
OPTIONAL = (
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "norm_topk_prob"),
    *("use_sliding_window", "attention_bias", "mlp_bias", "hidden_act", "decoder_sparse_step"),
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("left_out", [*OPTIONAL, "all of them"])
@pytest.mark.parametrize("family", CLASSES)
def test_what_is_left_out_is_what_transformers_takes(family: str, left_out: str) -> None:
    given = {"num_attention_heads": 64, "hidden_size": 128, "head_dim": 4, "norm_topk_prob": True}
    config = config_of(family, **given, tie_word_embeddings=True)
    for name in OPTIONAL if left_out == "all of them" else (left_out,):
        config.pop(name, None)
    theirs, ours = CLASSES[family](**config), model_shape(config, "here")
    assert ours.attention.kv_heads == theirs.num_key_value_heads
    assert ours.attention.head_dim == (getattr(theirs, "head_dim", None) or 128 // 64)
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    if ours.experts is not None:
        assert ours.experts.normalized == theirs.norm_topk_prob


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_as_many_key_value_heads_as_heads_where_they_are_null(family: str) -> None:
    config = config_of(family, num_key_value_heads=None)
    theirs = CLASSES[family](**config).num_key_value_heads
    assert model_shape(config, "here").attention.kv_heads == theirs == 8


@pytest.mark.parametrize(
    ("family", "field", "value", "message"),
    [
        ("qwen3_moe", "decoder_sparse_step", None, "decoder_sparse_step=None is not supported"),
        ("qwen2", "layer_types", 4, "layer_types=4 is not a list"),
        ("qwen2", "layer_types", [4], r"layer_types=\[4\] is not a list"),
        ("qwen2", "tie_word_embeddings", "false", "tie_word_embeddings='false' is neither true nor false"),
        ("qwen2", "use_sliding_window", "false", "use_sliding_window='false' is neither"),
        ("qwen3", "attention_bias", True, "attention_bias=True is not supported"),  # norms in its place
        ("llama", "attention_bias", 0, "attention_bias=0 is neither"),
        ("qwen3_moe", "norm_topk_prob", "true", "norm_topk_prob='true' is neither"),
        ("qwen2", "hidden_size", "48", "hidden_size='48' is not an integer"),
        ("qwen2", "hidden_size", 48.5, "hidden_size=48.5 is not an integer"),
        ("qwen2", "vocab_size", True, "vocab_size=True is not an integer"),
        ("qwen2", "vocab_size", None, "vocab_size=None is not an integer"),
        ("qwen2", "num_key_value_heads", 0, "kv_heads=0 cannot be"),
        ("qwen3_moe", "num_key_value_heads", None, "num_key_value_heads=None is not an integer"),
        ("qwen3", "head_dim", "128", "head_dim='128' is not an integer"),
        ("qwen3_moe", "num_experts", "4", "num_experts='4' is not an integer"),
        ("qwen2", "rms_norm_eps", "1e-6", "rms_norm_eps='1e-6' is not a number"),
        ("qwen2", "rope_theta", 0, "rope_theta=0.0 cannot be"),
        ("qwen2", "rope_theta", "1e6", "rope_theta='1e6' is not a number"),
        ("qwen2", "rope_scaling", "linear", "rope_scaling='linear' is not an object"),
        ("llama", "rope_scaling", LLAMA3 | {"factor": "8"}, "factor='8' is not a number"),
        ("llama", "rope_scaling", {**LLAMA3, "low_freq_factor": None}, "with low_freq_factor=None is not"),
    ],
)
def test_a_mistake_names_its_field(family: str, field: str, value: Any, message: str, tmp_path: Path) -> None:
    config = config_of(family, **{field: value})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"config.json: .*{message}"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_scaling_without_a_number_names_it(field: str) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != field}
    with pytest.raises(ConfigError, match=rf"here: .*{field}"):
        model_shape(config_of("llama", rope_scaling=scaling), "here")


def test_the_positions_of_a_scaling_may_stand_beside_it() -> None:
    scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    beside = {"original_max_position_embeddings": 8192, "max_position_embeddings": 131072}
    assert model_shape(config_of("llama", rope_scaling=scaling, **beside), "here").rope_scaling == 8.0
    with pytest.raises(ConfigError, match="original_max_position_embeddings=512 is not supported"):
        model_shape(config_of("llama", rope_scaling=scaling), "here")
