"""config.json: a mistake names its field, and what is left out is what transformers takes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import model_shape
from tests.support.checkpoint_models import config_of
from tests.support.fp8 import BLOCKS, FP8_CONFIG

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


DEFAULT = {"rope_theta": 1e6, "rope_type": "default"}
"""A folder that transformers 5 wrote, to which Qwen's pages add lines for long texts."""
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
FP8 = {**FP8_CONFIG, **BLOCKS}


def quantized(**config: Any) -> dict[str, Any]:
    return {"quantization_config": config}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        # types
        ("qwen2", {"intermediate_size": ...}, "'intermediate_size' is missing"),
        ("qwen3_moe", {"decoder_sparse_step": None}, "decoder_sparse_step=None is not supported"),
        ("qwen2", {"layer_types": 4}, "layer_types=4 is not a list"),
        ("qwen2", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is neither true nor false"),
        ("qwen3_moe", {"num_key_value_heads": None}, "num_key_value_heads=None is not an integer"),
        ("qwen2", {"rope_theta": "1e6"}, "rope_theta='1e6' is not a number"),
        ("qwen2", {"rope_scaling": "linear"}, "rope_scaling='linear' is not an object"),
        # values that no model has
        ("qwen2", {"num_key_value_heads": 0}, "kv_heads=0 cannot be"),
        ("qwen2", {"num_key_value_heads": 3}, "heads=8 is not a multiple of num_key_value_heads=3"),
        ("qwen2", {"rope_theta": 0}, "rope_theta=0.0 cannot be"),
        ("qwen3_moe", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 cannot be: there are 5 experts"),
        # other functions than the trainer's
        ("qwen2", {"model_type": "gpt2"}, "model_type='gpt2' is not supported"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* is not supp"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported"),  # norms in its place
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "per_tok=1 with norm_topk_prob"),
        # RoPE
        ("qwen2", {"rope_parameters": DEFAULT, "rope_scaling": YARN}, "RoPE scaling 'yarn' is not supported"),
        ("qwen2", {"rope_parameters": DEFAULT, "rope_scaling": LLAMA3}, "contradict .*: keep either rope_pa"),
        (  # transformers 5 then has the base 10,000
            "qwen2",
            {"rope_parameters": DEFAULT, "rope_scaling": {"type": "default"}, "rope_theta": None},
            "contradict each other",
        ),
        ("qwen2", {"rope_parameters": {"full_attention": DEFAULT}}, "of their own for 'full_attention'"),
        ("qwen2", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, "factor=0.5 is not supp"),
        ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor=2.0 is not"),
        # quantizations
        ("qwen3_moe", quantized(quant_method="awq", bits=4), "quant_method='awq', which is not supported"),
        ("qwen3_moe", quantized(quant_method="fp8", weight_block_size=[1, 32]), r"block_size=\[1, 32\]"),
        ("qwen3_moe", quantized(**FP8 | {"fmt": "e5m2"}), "fmt='e5m2', which is not supported"),
        ("qwen3_moe", quantized(**FP8, expert_dtype="fp4"), "expert_dtype='fp4'"),
        ("qwen3_moe", quantized(**FP8, modules_to_convert=["embed"]), r"modules_to_convert=\['embed'\]"),
    ],
)
def test_a_mistake_names_its_field(family: str, changes: dict[str, Any], message: str) -> None:
    given = {**config_of(family), **changes}  # ...: left out
    with pytest.raises(ConfigError, match=rf"here: .*{message}"):
        model_shape({name: value for name, value in given.items() if value is not ...}, "here")


def test_the_positions_of_a_scaling_may_stand_beside_it() -> None:
    scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    beside = {"original_max_position_embeddings": 8192, "max_position_embeddings": 131072}
    assert model_shape(config_of("llama", rope_scaling=scaling, **beside), "here").rope_scaling == 8.0
    with pytest.raises(ConfigError, match="original_max_position_embeddings=512 is not supported"):
        model_shape(config_of("llama", rope_scaling=scaling), "here")
