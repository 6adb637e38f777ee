"""Legacy mp_rank folders as they are read, and ``bapo-ckpt reshard``: weights, optimizer and common state."""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import MetadataIndex

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config import read_model_shape
from checkpoints_tools import reshard, to_hf, verify
from checkpoints_tools.archives.torch_archive import object_archive
from checkpoints_tools.archives.torch_zip import StoredTensor, read_archive
from checkpoints_tools.core.copying import copy_tensors
from checkpoints_tools.formats.distcp import COMMON_OBJECT, check_backends
from checkpoints_tools.formats.locate import open_checkpoint
from checkpoints_tools.formats.mp_rank import MpRank
from checkpoints_tools.formats.torch_dist import TorchDist
from checkpoints_tools.formats.torch_dist_writer import Contents, plan_torch_dist
from checkpoints_tools.hf_to_megatron import common_for_stacked
from checkpoints_tools.inspection import as_text, inspect_checkpoint
from tests.support.checkpoint_models import edit_metadata, folder_bytes, load_tensors, save_random_model
from tests.support.legacy_checkpoints import save_legacy


def read_torch_dist(folder: Path) -> TorchDist:
    content = open_checkpoint(folder).content
    assert isinstance(content, TorchDist)
    return content


def test_padding_of_the_vocabulary_is_cut(stored: Path, tmp_path: Path) -> None:
    reshard(stored, tmp_path / "padded", grid=3, vocabulary_multiple=64)
    padded = read_torch_dist(tmp_path / "padded")
    assert padded.metadata.tensors["embedding.word_embeddings.weight"].shape[0] == 128
    to_hf(tmp_path / "padded", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "hf")
    reshard(tmp_path / "padded", tmp_path / "plain")
    plain = read_torch_dist(tmp_path / "plain")
    assert plain.metadata.tensors["embedding.word_embeddings.weight"].shape[0] == 101
    with pytest.raises(ConfigError, match="--vocab-multiple -8: give a number of at least 1"):
        reshard(stored, tmp_path / "out", vocabulary_multiple=-8)


def test_reshard_refuses_what_another_command_does(tmp_path: Path) -> None:
    save_random_model(tmp_path / "hf")
    with pytest.raises(ConfigError, match="is a Hugging Face folder; bapo-ckpt to-megatron makes"):
        reshard(tmp_path / "hf", tmp_path / "out")


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
    assert alone.common.content["content_metadata"] != {"x": 1}


def move_common_into_object(stored: Path) -> bytes:
    """Change the checkpoint to the layout that megatron-core has from 0.19 on; the object's bytes."""
    torch.save([torch.load(stored / "common.pt", weights_only=False)], stored / "__9_0.distcp")
    (stored / "common.pt").unlink()
    written = (stored / "__9_0.distcp").read_bytes()
    (stored / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')

    def change(metadata: Any) -> None:
        state = next(v for k, v in metadata.state_dict_metadata.items() if "_extra_state" in k)
        metadata.state_dict_metadata[COMMON_OBJECT] = state
        place = next(iter(metadata.storage_data.values()))
        metadata.storage_data[MetadataIndex(COMMON_OBJECT)] = replace(
            place, relative_path="__9_0.distcp", offset=0, length=len(written)
        )

    edit_metadata(stored, change)
    return written


def test_the_common_state_is_read_and_written_where_it_is(stored: Path, tmp_path: Path) -> None:
    """The file, which each megatron-core reads, or the object that 0.19 writes: named, and kept."""
    state = {"iteration": 5, "content_metadata": {"singleton_local_shards": False}, "args": None}
    torch.save(state, stored / "common.pt")
    assert inspect_checkpoint(stored).common_state == "common.pt"
    written = move_common_into_object(stored)
    found = read_torch_dist(stored)
    assert found.common.content == state
    assert "common state  common_state/shard_0_1\n" in as_text(inspect_checkpoint(stored))
    reshard(stored, tmp_path / "out")
    kept = read_torch_dist(tmp_path / "out")
    place = kept.common.place
    assert (kept.common.layout, kept.common.content) == (COMMON_OBJECT, state)
    assert place.file.read_bytes()[place.start : place.start + place.length] == written
    assert not (kept.folder / "common.pt").exists()
    check_backends(kept.folder)
    assert (kept.folder / "metadata.json").read_text() == (stored / "metadata.json").read_text()
    found.layout = "singleton"
    [anew] = torch.load(io.BytesIO(common_for_stacked(found)), weights_only=False)
    assert anew["iteration"] == 5
    reshard(stored, tmp_path / "weights", weights_only=True)
    assert inspect_checkpoint(tmp_path / "weights").common_state == "common.pt"


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
    source.common.content["rng"] = {"state": StoredTensor(stored, 0, "U8", (1,), (1,))}
    with pytest.raises(CheckpointError, match=r"common\.pt: .* cannot be written anew .*--weights-only"):
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


LAYOUTS = [(1, 1), (2, 1), (1, 3), (4, 3)]


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "BF16"), ("qwen3", "F32"), ("llama", "F16")])
def test_conversions_give_the_original_files(
    family: str, dtype: str, tied: bool, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    files = 2 if dtype == "F32" else 1
    folder = save_random_model(tmp_path / "hf", family, dtype, files, tie_word_embeddings=tied)
    save_legacy(folder, tmp_path / "legacy", tensor, pipeline)
    to_hf(tmp_path / "legacy", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(folder)
    reshard(tmp_path / "legacy", tmp_path / "torch_dist", grid=3)
    to_hf(tmp_path / "torch_dist", tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(folder)


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    folder = save_random_model(tmp_path / "hf")
    save_legacy(folder, tmp_path / "legacy", tensor=2, pipeline=3)
    return tmp_path / "legacy/release"


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    state = load(path)
    edit(state)
    torch.save(state, path)


FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


def put(value: Any, name: str = FC2) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["model"].update({name: value})


def bf16(*sizes: int) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("ranks", "edit", "message"),
    [
        (
            ["01_001"],
            lambda state: state["model"].pop(FC2),
            "mp_rank_01_001/.* and .* hold different parameters",
        ),
        (
            ["00_001", "01_001"],
            lambda state: state["model"].pop(FC2),
            r"decoder\.layers\.1\.mlp\.linear_fc2\.weight is in no file",
        ),
        (["01_001"], put(bf16(48, 19)), r"mp_rank_01_001/.*fc2\.weight has shape \[48, 19\]; of \[48, 40\]"),
        (["01_001"], put(torch.zeros(48, 20)), r"mp_rank_01_001/.*fc2\.weight has type F32"),
        (
            ["00_001"],
            put(bf16(20, 48).T),
            r"mp_rank_00_001/.*fc2\.weight has type BF16 and strides \[1, 48\]",
        ),
        (
            ["00_001", "01_001"],
            put(torch.zeros(3), "decoder.layers.0.mlp.router.weight"),
            r"mp_rank_00_001/.*router\.weight belongs to no model",
        ),
        (["01_002"], put("text"), r"mp_rank_01_002/.*fc2\.weight is not a tensor"),
        (
            ["01_002"],
            lambda state: state.update(model0=state.pop("model"), model1={}),
            "mp_rank_01_002/.* holds 2 chunks of the model, other files 1",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    ranks: list[str], edit: Callable[[dict[str, Any]], object], message: str, legacy: Path
) -> None:
    for rank in ranks:
        change(legacy / f"mp_rank_{rank}/model_optim_rng.pt", edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(legacy)


def test_missing_and_strange_folders_are_named(legacy: Path) -> None:
    (legacy / "mp_rank_00_000_000").mkdir()
    with pytest.raises(CheckpointError, match="mp_rank_00_000_000: expected mp_rank_TP or mp_rank_TP_PPP"):
        open_checkpoint(legacy)
    (legacy / "mp_rank_00_000_000").rename(legacy / "mp_rank_00")
    with pytest.raises(CheckpointError, match="are both of rank"):
        open_checkpoint(legacy)
    (legacy / "mp_rank_00").rmdir()
    shutil.rmtree(legacy / "mp_rank_01_001")
    with pytest.raises(CheckpointError, match="no folder of tensor rank 1 and pipeline rank 1"):
        open_checkpoint(legacy)


def test_another_models_config_is_named(legacy: Path, tmp_path: Path) -> None:
    other = save_random_model(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0.* belongs to no model of .* 2 layers"):
        MpRank(legacy, read_model_shape(other)).tensors  # noqa: B018


def test_dropping_the_optimizer_needs_a_flag(legacy: Path, tmp_path: Path) -> None:
    change(legacy / "mp_rank_01_001/model_optim_rng.pt", lambda state: state.update(optimizer={"state": 1}))
    with pytest.raises(
        ConfigError, match="the optimizer of mp_rank folders is not converted; --weights-only"
    ):
        reshard(legacy, tmp_path / "out")
    reshard(legacy, tmp_path / "out", weights_only=True)
    change(legacy / "mp_rank_01_001/model_optim_rng.pt", lambda state: state.pop("optimizer"))
    (legacy / "mp_rank_00_000/distrib_optim.pt").touch()  # of the distributed optimizer
    with pytest.raises(ConfigError, match="the optimizer of mp_rank folders is not converted"):
        reshard(legacy, tmp_path / "out2")


def test_files_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Their entries stand in the 64-bit extension; of tensors without data torch writes a sparse file."""
    rows, columns = 600_000, 1024
    path = tmp_path / "model_optim_rng.pt"
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({str(i): torch.empty(rows, columns) for i in range(3)}, path)
    with path.open("r+b") as file:
        found = read_archive(file, path, "state")["2"]
        assert found.position > 2**32
        file.seek(found.position + 4 * columns)
        file.write(torch.tensor([1.5]).numpy().tobytes())
    loaded = torch.load(path, mmap=True, weights_only=True)["2"]
    assert (loaded[1, 0], loaded[0, 0], loaded.shape) == (1.5, 0, found.shape)
