"""``bapo-ckpt reshard``: weights, optimizer state and common state survive."""

from __future__ import annotations

import argparse
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint.metadata import MetadataIndex

from bapo_megatron.errors import CheckpointError, ConfigError
from checkpoints_tools import reshard, to_hf, to_megatron, verify
from checkpoints_tools.archives.torch_archive import object_archive
from checkpoints_tools.archives.torch_zip import StoredTensor
from checkpoints_tools.core.copying import copy_tensors
from checkpoints_tools.formats.locate import open_checkpoint
from checkpoints_tools.formats.torch_dist import TorchDist
from checkpoints_tools.formats.torch_dist_writer import Contents, plan_torch_dist
from checkpoints_tools.to_megatron import common_for_stacked
from tests.support.checkpoint_models import edit_metadata, folder_bytes, load_tensors, save_random_model


def read_torch_dist(folder: Path) -> TorchDist:
    content = open_checkpoint(folder).content
    assert isinstance(content, TorchDist)
    return content


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Three layers, each matrix in two chunks."""
    save_random_model(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "torch_dist", grid=2)
    return tmp_path / "torch_dist/release"


def test_padding_of_the_vocabulary_is_cut(stored: Path, tmp_path: Path) -> None:
    reshard(stored, tmp_path / "padded", grid=3, vocabulary_multiple=64)
    padded = read_torch_dist(tmp_path / "padded")
    assert padded.metadata.tensors["embedding.word_embeddings.weight"].shape[0] == 128
    to_hf(tmp_path / "padded", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "hf")
    reshard(tmp_path / "padded", tmp_path / "plain")
    plain = read_torch_dist(tmp_path / "plain")
    assert plain.metadata.tensors["embedding.word_embeddings.weight"].shape[0] == 101


def test_reshard_refuses_what_another_command_does(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a Hugging Face folder; bapo-ckpt to-megatron makes"):
        reshard(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(ConfigError, match="--grid 0"):
        reshard(stored, tmp_path / "out", grid=0)
    with pytest.raises(ConfigError, match="--vocab-multiple 0"):
        reshard(stored, tmp_path / "out", vocabulary_multiple=0)


def test_objects_beside_the_weights_are_carried_along(stored: Path, tmp_path: Path) -> None:
    """States of random number generators, say; and the common state byte for byte."""
    torch.save({"seed": 5}, stored / "__9_0.distcp")
    size = (stored / "__9_0.distcp").stat().st_size

    def change(metadata: Any) -> None:
        state = next(v for k, v in metadata.state_dict_metadata.items() if "_extra_state" in k)
        metadata.state_dict_metadata["rng_state/shard_0.0_1.1"] = state
        info = replace(
            next(iter(metadata.storage_data.values())), relative_path="__9_0.distcp", offset=0, length=size
        )
        metadata.storage_data[MetadataIndex("rng_state/shard_0.0_1.1")] = info

    extra = "decoder.layers.mlp.linear_fc1._extra_state/shard_1_3"  # of FP8, say

    def change_both(metadata: Any) -> None:
        change(metadata)
        metadata.storage_data[MetadataIndex(extra)] = metadata.storage_data[
            MetadataIndex("rng_state/shard_0.0_1.1")
        ]

    edit_metadata(stored, change_both)
    torch.save({"iteration": 5, "content_metadata": {"x": 1}, "args": None}, stored / "common.pt")
    reshard(stored, tmp_path / "out")
    found = read_torch_dist(tmp_path / "out")
    for key in ("rng_state/shard_0.0_1.1", extra):
        place = found.metadata.objects[key]
        data = place.file.read_bytes()[place.start : place.start + place.length]
        assert data == (stored / "__9_0.distcp").read_bytes()
    assert (found.folder / "common.pt").read_bytes() == (stored / "common.pt").read_bytes()
    reshard(stored, tmp_path / "weights", weights_only=True)
    alone = read_torch_dist(tmp_path / "weights")
    assert "rng_state/shard_0.0_1.1" not in alone.metadata.objects
    assert alone.common["content_metadata"] != {"x": 1}


def test_the_common_state_is_written_anew_for_other_keys(stored: Path) -> None:
    """As it was, but for the rules of the keys. What cannot be written so is named."""
    arguments = argparse.Namespace(backend=AttnBackend.auto, dtype="bf16", sizes=[1, (2.5, None)])
    content = {"singleton_local_shards": True, "non_homogeneous_layers": True, "kept": 7}
    torch.save({"args": arguments, "content_metadata": content, "iteration": 5}, stored / "common.pt")
    source = read_torch_dist(stored)
    assert common_for_stacked(source) == (stored / "common.pt").read_bytes()
    source.layout = "singleton"
    written = torch.load(io.BytesIO(common_for_stacked(source)), weights_only=False)
    assert written["args"] == arguments
    assert written["iteration"] == 5
    expected = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "kept": 7}
    assert written["content_metadata"] == expected
    source.common["rng"] = {"state": StoredTensor(stored, 0, "U8", (1,), (1,))}
    with pytest.raises(CheckpointError, match=r"common\.pt cannot be written anew .*--weights-only"):
        common_for_stacked(source)


def save_with_optimizer(hf: Path, folder: Path, changes: dict[str, float]) -> Path:
    """Weights and Adam's state under the trainer's keys; ``changes`` go to first elements of ``exp_avg``."""
    source = open_checkpoint(hf)
    tensors = dict(source.tensors)
    prefixes = tuple(f"optimizer.state.{state}." for state in ("param", "exp_avg", "exp_avg_sq"))
    for prefix in prefixes:
        tensors |= {prefix + n: replace(t, name=prefix + n) for n, t in source.tensors.items()}
    settings = {"param_state_sharding_type": "fully_reshardable"}
    contents = Contents(object_archive({"optimizer": settings}), prefixes)
    plan = plan_torch_dist(tensors, source.shape, folder, 2, contents)
    plan.create()
    copy_tensors(tensors, plan.tensors, 1)
    for name, value in changes.items():
        block = plan.tensors["optimizer.state.exp_avg." + name].blocks[0]
        with block.file.open("r+b") as file:
            file.seek(block.position)
            file.write(torch.tensor([value]).numpy().tobytes())
    plan.complete()
    return folder


def test_the_optimizers_state_is_compared_and_resharded(tmp_path: Path) -> None:
    hf = save_random_model(tmp_path / "hf", dtype="F32")
    first = save_with_optimizer(hf, tmp_path / "first", {})
    second = save_with_optimizer(hf, tmp_path / "second", {"model.norm.weight": 1.5})
    [difference] = verify(first, second, reference=hf).differences
    assert difference.tensor == "optimizer exp_avg model.norm.weight"
    assert "1.5 (0x3fc00000) in the second" in difference.message
    assert verify(first, second, reference=hf, weights_only=True).equal
    done = reshard(second, tmp_path / "again", grid=5, vocabulary_multiple=8, reference=hf)
    assert (done.tensors, done.states) == (39, 3 * 39)
    assert done.parameters == sum(tensor.numel() for tensor in load_tensors(hf).values())
    assert "117 tensors of the optimizer" in str(done)
    found = verify(second, tmp_path / "again")
    assert (found.equal, found.tensors) == (True, 4 * 39)


def test_two_checkpoints_without_a_config_are_compared_with_a_third(stored: Path, tmp_path: Path) -> None:
    reshard(stored, tmp_path / "other")
    for folder in (stored, tmp_path / "other/release"):
        (folder / "hf/config.json").unlink()
    with pytest.raises(CheckpointError, match="carries no config.json"):
        verify(stored, tmp_path / "other")
    assert verify(stored, tmp_path / "other", reference=tmp_path / "hf").equal
