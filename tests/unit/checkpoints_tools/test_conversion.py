"""Hugging Face to torch_dist and back: bitwise round trips for every family; early errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.weight_files import INDEX
from bapo_megatron.runtime.written_folders import MARK
from checkpoints_tools import Settings, cli, to_hf, to_megatron
from checkpoints_tools.formats import torch_dist_writer
from tests.support.checkpoint_models import (
    folder_bytes,
    load_tensors,
    save_changed,
    save_random_model,
    save_tensors,
)
from tests.support.models import EXPERTS, FAMILIES


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("family", [*FAMILIES, EXPERTS])
def test_round_trips_give_the_same_files(
    family: str, dtype: str, tied: bool, files: int, tmp_path: Path
) -> None:
    folder = save_random_model(tmp_path / "hf", family, dtype, files, tie_word_embeddings=tied)
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(folder)


@pytest.mark.parametrize(
    ("grid", "changes"),
    [
        (1, {}),
        (8, {"head_dim": 5}),
        (8, {"head_dim": 1, "num_key_value_heads": 1, "intermediate_size": 3}),  # fewer rows than pieces
        (7, {"head_dim": 9, "num_key_value_heads": 8, "vocab_size": 3}),
        (1024, {"num_hidden_layers": 1}),
    ],
)
def test_round_trips_of_odd_shapes(grid: int, changes: dict, tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "hf", "qwen2", **changes)
    to_megatron(folder, tmp_path / "megatron", grid)
    to_hf(tmp_path / "megatron", tmp_path / "back", settings=Settings(threads=3))
    assert folder_bytes(tmp_path / "back") == folder_bytes(folder)


def test_files_beside_the_weights(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "hf", "qwen3")
    to_megatron(folder, tmp_path / "megatron")
    checkpoint = tmp_path / "megatron/release"
    assert (tmp_path / "megatron/latest_checkpointed_iteration.txt").read_text() == "release"
    assert dist_checkpointing.check_is_distributed_checkpoint(str(checkpoint))
    common = dist_checkpointing.load_common_state_dict(checkpoint)
    assert common["content_metadata"] == {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    arguments = common["args"]
    assert (arguments.num_layers, arguments.kv_channels, arguments.padded_vocab_size) == (3, 24, 101)
    assert (arguments.rotary_base, arguments.norm_epsilon, arguments.qk_layernorm) == (1000000, 1e-6, True)
    carried = folder_bytes(checkpoint / "hf")
    whole = folder_bytes(folder)
    assert carried == {name: whole[name] for name in whole if name != "model.safetensors"}


def test_matrices_are_cut_into_the_grid_and_vectors_are_not(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "hf", "qwen2")
    to_megatron(folder, tmp_path / "megatron", grid=4)
    metadata = dcp.FileSystemReader(tmp_path / "megatron/release").read_metadata().state_dict_metadata

    def chunks(key: str) -> set[tuple[int, ...]]:
        return {tuple(chunk.sizes) for chunk in metadata[key].chunks}

    # 8 heads in 4 groups of head size 6: 4 x (2 + 1 + 1) x 6 = 96 rows; TP2 and TP4 cut between groups.
    assert chunks("decoder.layers.self_attention.linear_qkv.weight") == {(1, 24, 48)}
    assert chunks("decoder.layers.self_attention.linear_qkv.bias") == {(1, 96)}
    assert chunks("decoder.layers.self_attention.linear_proj.weight") == {(1, 48, 12)}
    assert chunks("decoder.layers.mlp.linear_fc1.weight") == {(1, 10, 48)}
    assert chunks("decoder.layers.mlp.linear_fc2.weight") == {(1, 48, 10)}
    assert chunks("decoder.final_layernorm.weight") == {(48,)}
    assert chunks("output_layer.weight") == {(25, 48), (26, 48)}


def test_no_chunk_is_larger_than_an_archive_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist_writer, "MOST_CHUNK_BYTES", 500)
    folder = save_random_model(tmp_path / "hf", "llama")
    to_megatron(folder, tmp_path / "megatron", grid=1)
    metadata = dcp.FileSystemReader(tmp_path / "megatron/release").read_metadata()
    assert max(place.length for place in metadata.storage_data.values()) < 2000
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(folder)


def test_a_copy_of_a_tied_embedding_comes_back_where_the_index_lists_it(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "hf", "llama", tie_word_embeddings=True)
    tensors = load_tensors(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    (folder / "model.safetensors").unlink()
    save_tensors(folder, tensors, files=2)
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(folder)


def test_rounding_changes_only_the_dtype(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "hf", dtype="F32", files=2, torch_dtype="float32")
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", dtype="bf16")
    old, new = (json.loads((f / INDEX).read_text()) for f in (folder, tmp_path / "back"))
    assert new["weight_map"] == old["weight_map"]
    assert new["metadata"]["total_size"] * 2 == old["metadata"]["total_size"]
    back = load_tensors(tmp_path / "back")
    for name, tensor in load_tensors(folder).items():
        assert back[name].dtype == torch.bfloat16
        assert torch.equal(back[name].isnan(), tensor.isnan())
        assert torch.equal(back[name].nan_to_num(0.5), tensor.bfloat16().nan_to_num(0.5)), name
    old, new = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "back"))
    assert (old.pop("torch_dtype"), new.pop("torch_dtype")) == ("float32", "bfloat16")
    assert old == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "tensor model.norm.weight is missing"),
        ({"model.extra": torch.zeros(2)}, "tensor model.extra is not of this model family"),
        ({"model.norm.weight": torch.zeros(7)}, r"model.norm.weight has shape \[7\], .* \[48\]"),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.zeros(40, 48)},
            "1.mlp.up_proj.weight is F32 .* is BF16",
        ),
        ({"model.layers.0.input_layernorm.weight": torch.zeros(48).double()}, "is of type 'F64'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict, message: str, tmp_path: Path) -> None:
    folder = save_changed(save_random_model(tmp_path / "hf"), tmp_path / "other", **change)
    with pytest.raises(CheckpointError, match=message):
        to_megatron(folder, tmp_path / "megatron")
    assert not list(tmp_path.glob("*megatron*"))


def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_random_model(tmp_path / "hf")
    before = sorted(tmp_path.rglob("*"))
    assert cli.run(["to-megatron", str(folder), str(tmp_path / "new/megatron"), "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert cli.run(["to-megatron", str(folder), str(tmp_path / "new/megatron")]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == planned.splitlines()[:2]
    files = (path for path in (tmp_path / "new").rglob("*") if path.is_file() and path.name != MARK)
    written = sum(path.stat().st_size for path in files)
    assert f"({written:,} bytes)" in planned


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, megatron, back = save_random_model(tmp_path / "hf"), tmp_path / "megatron", tmp_path / "back"
    assert cli.run(["to-megatron", str(folder), str(megatron), "--grid", "2", "--threads", "2"]) == 0
    assert " kB in 0:00:0" in capsys.readouterr().err
    assert cli.run(["to-hf", str(megatron), str(back), "--shard-gb", "0.00005"]) == 0
    assert len(list(back.glob("*.safetensors"))) > 1
    assert cli.run(["to-hf", str(megatron), str(back)]) == 2
    assert "exists; --overwrite replaces it" in capsys.readouterr().err
    assert cli.run(["to-hf", str(megatron), str(back), "--overwrite", "--hf-reference", str(folder)]) == 0
    assert folder_bytes(back) == folder_bytes(folder)
    assert cli.run(["to-hf", str(megatron), str(tmp_path / "x"), "--from", "optimizer"]) == 2
    assert "no optimizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert"], "unknown command 'convert'; there are to-megatron, to-hf"),
        (["to-megatron", "nowhere", "out"], "nowhere: no config.json there"),
        (["to-hf", "{hf}", "out"], "is a Hugging Face folder already"),
        (["to-megatron", "{hf}", "{hf}/out"], "lie in, one another"),
        (["to-megatron", "{hf}", "{hf}"], "lie in, one another"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_random_model(tmp_path / "hf")
    assert cli.run([argument.format(hf=folder) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line_and_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, file = save_random_model(tmp_path / "hf"), tmp_path / "file"
    file.touch()
    assert cli.run(["to-megatron", str(hf), str(file / "out")]) == 2
    assert f"error: {file}: File exists\n" in capsys.readouterr().err
