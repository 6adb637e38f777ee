"""Reader of legacy mp_rank folders: bitwise conversions, files beyond 4 GB, errors for missing tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config import read_model_shape
from checkpoints_tools import to_hf
from checkpoints_tools.archives.torch_zip import read_archive
from checkpoints_tools.formats.locate import open_checkpoint
from checkpoints_tools.formats.mp_rank import MpRank
from checkpoints_tools.to_megatron import reshard
from tests.support.checkpoint_models import folder_bytes, save_random_model
from tests.support.legacy_checkpoints import save_legacy

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


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    state = load(path)
    edit(state)
    torch.save(state, path)


def drop(state: dict[str, Any]) -> None:
    del state["model"]["decoder.layers.0.mlp.linear_fc2.weight"]


def shorten(state: dict[str, Any]) -> None:
    state["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(48, 19, dtype=torch.bfloat16)


def retype(state: dict[str, Any]) -> None:
    state["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(48, 20)


def transpose(state: dict[str, Any]) -> None:
    state["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(20, 48, dtype=torch.bfloat16).T


def add(state: dict[str, Any]) -> None:
    state["model"]["decoder.layers.0.mlp.router.weight"] = torch.zeros(3)


def unmake(state: dict[str, Any]) -> None:
    state["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = "text"


def split(state: dict[str, Any]) -> None:
    state |= {"model0": state.pop("model"), "model1": {}}


def remove(state: dict[str, Any]) -> None:
    state.pop("model")


@pytest.mark.parametrize(
    ("ranks", "edit", "message"),
    [
        (["01_001"], drop, "mp_rank_01_001/.* and .*mp_rank_00_001/.* hold different parameters"),
        (["00_001", "01_001"], drop, r"decoder\.layers\.1\.mlp\.linear_fc2\.weight is in no file"),
        (["01_001"], shorten, r"mp_rank_01_001/.*fc2\.weight has shape \[48, 19\]; of \[48, 40\]"),
        (["01_001"], retype, r"mp_rank_01_001/.*fc2\.weight has type F32"),
        (["00_001"], transpose, r"mp_rank_00_001/.*fc2\.weight has type BF16 and strides \[1, 48\]"),
        (["00_001", "01_001"], add, r"mp_rank_00_001/.*router\.weight belongs to no model"),
        (["01_002"], unmake, r"mp_rank_01_002/.*fc2\.weight is no tensor"),
        (["01_002"], split, "mp_rank_01_002/.* holds 2 chunks of the model, other files 1"),
        (["00_000"], remove, "mp_rank_00_000/model_optim_rng.pt holds no model"),
    ],
)
def test_what_does_not_fit_is_named(
    ranks: list[str], edit: Callable[[dict[str, Any]], None], message: str, legacy: Path
) -> None:
    for rank in ranks:
        change(legacy / f"mp_rank_{rank}/model_optim_rng.pt", edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(legacy)


def test_missing_and_strange_folders_are_named(legacy: Path) -> None:
    (legacy / "mp_rank_00_000/model_optim_rng.pt").rename(legacy / "kept.pt")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_000/model_optim_rng\.pt is missing"):
        open_checkpoint(legacy)
    (legacy / "kept.pt").rename(legacy / "mp_rank_00_000/model_optim_rng.pt")
    (legacy / "mp_rank_00_000_000").mkdir()
    with pytest.raises(CheckpointError, match="mp_rank_00_000_000: expected mp_rank_TP or mp_rank_TP_PPP"):
        open_checkpoint(legacy)
    (legacy / "mp_rank_00_000_000").rename(legacy / "mp_rank_00")
    with pytest.raises(CheckpointError, match="mp_rank_00_000 are both of rank|mp_rank_00 and"):
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
