"""The table of names: layouts by hand, exact round trips, and the checks of a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape, model_shape, read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors, mapping_table
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.policy.weight_map import shard, shard_parts, split, unshard
from tests.support.checkpoint_models import join, save_changed
from tests.support.models import EXPERTS, FAMILIES, save_tiny_model
from tests.unit.hf.test_config_fields import LLAMA3


def shape(**changes: object) -> ModelShape:
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 1,
        "intermediate_size": 4,
        "vocab_size": 8,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6,
        **changes,
    }
    return model_shape(config, "test")


def test_qkv_rows_stand_by_group() -> None:
    """4 heads, 2 groups, head size 1: each group is its two query rows, its key row, its value row."""
    mapping = mapping_table(shape())["decoder.layers.{layer}.self_attention.linear_qkv.bias"]
    joined = join(mapping, [torch.tensor([1, 2, 3, 4]), torch.tensor([10, 20]), torch.tensor([100, 200])])
    assert joined.tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    assert mapping.shape == (8,)
    assert shard(mapping, joined, 1, 2).tolist() == [3, 4, 20, 200]


def test_gate_and_up_are_cut_each_on_its_own() -> None:
    mapping = mapping_table(shape())["decoder.layers.{layer}.mlp.linear_fc1.weight"]
    joined = join(mapping, [torch.tensor([[1], [2], [3], [4]]), torch.tensor([[5], [6], [7], [8]])])
    assert shard(mapping, joined, 0, 2).flatten().tolist() == [1, 2, 5, 6]
    assert shard(mapping, joined, 1, 2).flatten().tolist() == [3, 4, 7, 8]


@pytest.mark.parametrize("family", [*FAMILIES, EXPERTS])
@pytest.mark.parametrize("tp", [1, 2])
def test_shards_are_what_a_rank_reads_and_join_bitwise(family: str, tp: int, tmp_path: Path) -> None:
    """No element is read by two ranks, but those of parameters that tensor parallelism repeats."""
    reader = HfReader(save_tiny_model(family, tmp_path))
    for name, mapping in mapping_table(read_model_shape(tmp_path)).items():
        names = [hf_name.format(layer=1) for hf_name in mapping.hf_names]
        tensors = [reader.read(hf_name) for hf_name in names]
        pieces = [shard(mapping, join(mapping, tensors), rank, tp) for rank in range(tp)]
        for tensor, back in zip(tensors, split(mapping, unshard(mapping, pieces)), strict=True):
            assert torch.equal(tensor, back), name
        for rank, piece in enumerate(pieces):
            parts = [
                reader.read(names[part.source], part.rows, part.columns)
                for part in shard_parts(mapping, rank, tp)
            ]
            assert torch.equal(torch.cat(parts), piece), name


@pytest.mark.parametrize("family", [*FAMILIES, EXPERTS])
def test_transformers_writes_exactly_the_tensors_of_the_table(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path)
    HfReader(folder).check(read_model_shape(folder))
    stored = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert stored == hf_tensors(read_model_shape(folder))


def test_an_output_layer_unlike_its_tied_embedding_is_refused(tmp_path: Path) -> None:
    """transformers computes with both, the policy would with the embedding alone."""
    model, folder = save_tiny_model("llama", tmp_path / "hf"), tmp_path / "copy"
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    save_changed(model, folder, **{"lm_head.weight": embedding.clone()})
    HfReader(folder).check(read_model_shape(folder))
    for other in (embedding.flip(0).contiguous(), embedding[:-1].clone()):
        save_changed(model, folder, **{"lm_head.weight": other})
        with pytest.raises(ConfigError, match=r"ties lm_head.weight to .* not equal: set \"tie_word_emb"):
            HfReader(folder).check(read_model_shape(folder))


def test_old_and_new_rope_fields_mean_the_same() -> None:
    old = shape(rope_theta=5e5, rope_scaling=None)
    new = shape(
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, layer_types=["full_attention"] * 2
    )
    assert old == new
    both = {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    for left_out in ("rope_parameters", "rope_scaling"):
        assert shape(**{**both, left_out: None}) == shape(**both)
    assert shape(**both).rope_scaling == 8.0
