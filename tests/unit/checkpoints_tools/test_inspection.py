"""``bapo-ckpt inspect``: format, shapes and origin of a checkpoint, without reading weights."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints_tools import cli, inspect_checkpoint, reshard, to_megatron
from checkpoints_tools.inspection import as_text
from tests.support.checkpoint_models import load_tensors, save_random_model
from tests.support.legacy_checkpoints import save_legacy


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "hf", "qwen3", files=2)


def test_a_hugging_face_folder(hf: Path) -> None:
    found = inspect_checkpoint(hf)
    tensors = load_tensors(hf)
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert (found.format, found.layout, found.iteration, found.optimizer) == ("HF", None, None, None)
    assert (found.parameters, found.dtypes) == (elements, {"BF16": 2 * elements})
    assert found.total_bytes == sum(path.stat().st_size for path in hf.rglob("*") if path.is_file())
    assert found.model is not None
    assert (found.model["layers"], found.model["head_dim"], found.model["tied"]) == (3, 24, False)
    groups = {group.key: group for group in found.keys}
    gate = groups["model.layers.*.mlp.gate_proj.weight"]
    assert (gate.dtype, gate.shape, gate.count) == ("BF16", (40, 48), 3)
    assert groups["lm_head.weight"].shape == (101, 48)
    assert sum(group.count for group in found.keys) == len(tensors)


def test_torch_dist(hf: Path, tmp_path: Path) -> None:
    to_megatron(hf, tmp_path / "megatron", grid=4)
    reshard(tmp_path / "megatron", tmp_path / "padded", vocabulary_multiple=64)
    found, padded = inspect_checkpoint(tmp_path / "megatron"), inspect_checkpoint(tmp_path / "padded")
    assert (found.format, found.layout, found.vocabulary_rows) == ("torch_dist", "stacked", 101)
    assert padded.vocabulary_rows == 128
    assert found.parameters == padded.parameters == inspect_checkpoint(hf).parameters
    groups = {group.key: group for group in found.keys}
    assert groups["decoder.layers.mlp.linear_fc1.weight"].shape == (3, 80, 48)
    assert groups["decoder.layers.mlp.linear_fc1.weight"].chunks == 3 * 2 * 4
    extra = groups["decoder.layers.mlp.linear_fc1._extra_state/shard_*_3"]
    assert (extra.dtype, extra.count) == ("object", 3)
    text = as_text(padded)
    assert "vocabulary  128 rows, 27 of padding" in text
    assert "  embedding.word_embeddings.weight  BF16 [128, 48], 8 chunks" in text


def test_what_the_writers_arguments_say(hf: Path, tmp_path: Path) -> None:
    """Of Megatron-LM: where it was written, and at which iteration; a folder's name comes first."""
    to_megatron(hf, tmp_path / "megatron")
    folder = tmp_path / "megatron/release"
    arguments = argparse.Namespace(
        tensor_model_parallel_size=8, pipeline_model_parallel_size=4, world_size="64"
    )
    torch.save({"args": arguments, "iteration": 300}, folder / "common.pt")
    found = inspect_checkpoint(folder)
    assert (found.iteration, found.written_at) == (300, {"tensor": 8, "pipeline": 4})
    assert "written at  TP8 PP4\n" in as_text(found)
    folder.rename(tmp_path / "iter_0000250")
    assert inspect_checkpoint(tmp_path / "iter_0000250").iteration == 250


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "TP2 PP2 VPP1 CP1 DP4"),  # of a version that wrote no more
        ({"expert": 1, "expert_tensor": 1, "pipeline_layers": [2, 2]}, "TP2 PP2 VPP1 CP1 DP4"),
        (
            {"expert": 8, "expert_tensor": 2, "pipeline_layers": [1, 3]},
            "TP2 PP2 VPP1 CP1 DP4 EP8 ETP2 layers 1,3",
        ),
    ],
)
def test_what_the_trainer_says_of_its_layout(more: dict, text: str, hf: Path, tmp_path: Path) -> None:
    to_megatron(hf, tmp_path / "megatron")
    folder = tmp_path / "megatron/release"
    written = {"tensor": 2, "pipeline": 2, "virtual": 1, "context": 1, "data": 4, **more}
    torch.save({"written_at": written}, folder / "common.pt")
    found = inspect_checkpoint(folder)
    assert found.written_at == written
    assert f"written at  {text}\n" in as_text(found)


def test_mp_rank_folders(hf: Path, tmp_path: Path) -> None:
    save_legacy(hf, tmp_path / "legacy", tensor=2, pipeline=3)
    found = inspect_checkpoint(tmp_path / "legacy")
    assert (found.format, found.optimizer) == ("mp_rank", None)
    assert found.written_at == {"tensor": 2, "pipeline": 3, "virtual": 1}
    assert found.vocabulary_rows == 256
    groups = {group.key: group for group in found.keys}
    assert groups["stage 2: decoder.layers.*.mlp.linear_fc1.weight"].shape == (40, 48)
    assert groups["stage 2: output_layer.weight"].shape == (128, 48)
    files = (tmp_path / "legacy/release").glob("mp_rank_*/model_optim_rng.pt")
    stored = sum(
        tensor.nbytes
        for path in files
        for tensor in torch.load(path, weights_only=False)["model"].values()
        if isinstance(tensor, torch.Tensor)
    )
    assert found.dtypes == {"BF16": stored}  # of both tensor ranks
    (tmp_path / "legacy/release/mp_rank_01_000/distrib_optim.pt").touch()
    assert inspect_checkpoint(tmp_path / "legacy").optimizer == "mp_rank"


def test_a_checkpoint_without_a_config_is_inspected(hf: Path, tmp_path: Path) -> None:
    to_megatron(hf, tmp_path / "megatron")
    folder = tmp_path / "megatron/release"
    (folder / "hf/config.json").unlink()
    found = inspect_checkpoint(folder)
    assert found.model is None
    assert found.parameters == inspect_checkpoint(hf).parameters
    assert "unknown: the checkpoint carries no config.json; --hf-reference names one" in as_text(found)
    assert inspect_checkpoint(folder, reference=hf).model is not None


def test_an_inspection_reads_no_weights(hf: Path, tmp_path: Path) -> None:
    to_megatron(hf, tmp_path / "megatron")
    before = inspect_checkpoint(tmp_path / "megatron")
    for path in (tmp_path / "megatron/release").glob("*.distcp"):
        size = path.stat().st_size
        path.unlink()
        with path.open("wb") as file:
            file.truncate(size)
    assert inspect_checkpoint(tmp_path / "megatron") == before


def test_the_command(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(hf)]) == 0
    text = capsys.readouterr().out
    assert "format      HF\n" in text
    assert "Qwen3 dense: 3 layers, hidden 48, 8 heads of 24 on 4 KV groups, MLP 40, vocabulary 101" in text
    assert "    layers.*\n" in text
    assert cli.run(["inspect", str(hf), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["family"] == "qwen3"
    assert found["keys"][0] == {
        "key": "lm_head.weight",
        "dtype": "BF16",
        "shape": [101, 48],
        "count": 1,
        "chunks": 1,
    }
    assert cli.run(["inspect", str(hf / "absent")]) == 2
    assert "absent is no folder" in capsys.readouterr().err


def test_a_closed_pipe_ends_the_command_quietly(hf: Path) -> None:
    command = [sys.executable, "-m", "checkpoints_tools.cli", "inspect", str(hf)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    assert (child.stderr.read() if child.stderr else b"") == b""
    assert child.wait() == -signal.SIGPIPE
