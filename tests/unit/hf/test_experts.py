"""Shapes of models: Qwen3's and Qwen2.5's as published; experts in config.json, chunks and folders."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import model_shape, read_model_shape
from bapo_megatron.hf.parameter_map import (
    expert_tensors,
    hf_tensors,
    mapping_table,
)
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.layers.mlp import Experts, SharedExperts
from bapo_megatron.rollout.engines.sglang.backend import SglangBackend
from tests.support.checkpoint_models import config_of
from tests.support.cluster_recipes import FOLDER
from tests.support.models import EXPERTS, SingleWriter, save_tiny_model, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(EXPERTS, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, as transformers saves them when it is told to keep its own format."""
    path = tmp_path_factory.mktemp("fused")
    tiny_model(EXPERTS).save_pretrained(path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(path / "model.safetensors")
    return path


def test_the_names_of_the_hub_and_of_transformers_5_are_read() -> None:
    config = config_of(EXPERTS)
    wanted = Experts(count=5, per_token=2, ffn=24, normalized=False)
    assert model_shape(config, "here").experts == wanted
    config["num_local_experts"] = config.pop("num_experts")
    assert model_shape(config, "here").experts == wanted
    assert model_shape({**config, "norm_topk_prob": True}, "here").experts.normalized  # type: ignore[union-attr]


def test_the_flops_of_a_shared_expert_are_those_of_its_matrices() -> None:
    """Gate, up and down of 3 x 48 x 32, and the row that gates its output; the rest is as without it."""
    sizes = {"count": 5, "per_token": 2, "ffn": 24, "normalized": True}
    own, without = SharedExperts(**sizes, shared=32).flops(48), Experts(**sizes).flops(48)
    assert own == replace(without, linear=2 * (3 * 48 * 32 + 48), selective=2 * (3 * 48 * 32 + 48))


def test_a_fused_folder_reads_as_the_plain_one(folder: Path, fused: Path) -> None:
    plain, other = HfReader(folder), HfReader(fused)
    shape = read_model_shape(folder)
    other.check(shape)
    assert (plain.fused_experts, len(other.fused_experts)) == ([], 8)
    for mapping in mapping_table(shape).values():
        for name in (one.format(layer=2) for one in mapping.hf_names):
            assert torch.equal(other.read(name), plain.read(name)), name
            assert other.shape(name) == plain.shape(name)
    up = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert torch.equal(other.read(up, slice(3, 7), slice(2, 5)), plain.read(up)[3:7, 2:5])


def test_sglang_is_not_given_a_fused_folder(folder: Path, fused: Path) -> None:
    SglangBackend().check_weights(folder)
    with pytest.raises(ConfigError, match="fused experts .*down_proj.* SGLang would leave random"):
        SglangBackend().check_weights(fused)


def test_weights_for_a_fused_folder_are_staged_by_expert(fused: Path, folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    staged = SingleWriter(tmp_path / "weights", fused).write(weights.items(), 1)
    found = load_file(staged / "model-00000.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_is_what_was_published(name: str) -> None:
    shape = read_model_shape(SHAPES / name)
    tensors, own = hf_tensors(shape), shape.attention
    facts = (shape.layers, own.heads, own.kv_heads, shape.tied, shape.rope_theta, shape.max_positions)
    assert (*facts, len(tensors), 2 * sum(map(math.prod, tensors.values()))) == PUBLISHED[name]


def test_transformers_makes_the_same_tensors_of_a_hybrid_with_experts() -> None:
    """Beside those of vision; it has the experts of a layer fused, as the hub's folder."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder, theirs = SHAPES / "Qwen3.6-35B-A3B", {}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    shape = read_model_shape(folder)
    for name, tensor in model.named_parameters():
        own = expert_tensors(name, tensor.shape)
        places = {one: tensor[place].shape for one, place in own.items()} or {name: tensor.shape}
        theirs |= {one: tuple(place) for one, place in places.items() if not one.startswith(shape.untrained)}
    assert hf_tensors(shape) == theirs
    assert sum(map(math.prod, theirs.values())) == 34_660_610_688
