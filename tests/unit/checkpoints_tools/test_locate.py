"""Resolution of a path to a checkpoint, refused paths, and what ``bapo-ckpt inspect`` says of one."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bapo_megatron.checkpoint.run_directory import FORMAT
from bapo_megatron.errors import CheckpointError, ConfigError
from checkpoints_tools import cli, inspect_checkpoint, reshard, to_megatron
from checkpoints_tools.formats.locate import Format, hf_reference, locate
from checkpoints_tools.inspection import as_text
from tests.support.checkpoint_models import save_random_model
from tests.support.legacy_checkpoints import save_legacy
from tests.support.models import EXPERTS
from tests.unit.checkpoints_tools.conftest import make_step


def touch(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (20, 100, 120):
        make_step(tmp_path / "run", step)
    touch(tmp_path / "run/checkpoints/.step_000140.tmp/policy/.metadata")
    model = touch(tmp_path / "model/config.json", "{}").parent
    config = {"format": FORMAT, "config": {"model.hf_path": str(model)}}
    touch(tmp_path / "run/config.json", json.dumps(config))
    return tmp_path / "run"


def test_the_tracker_names_the_iteration(tmp_path: Path) -> None:
    touch(tmp_path / "iter_0000100/.metadata")
    touch(tmp_path / "iter_0000200/mp_rank_00_000/model_optim_rng.pt")
    touch(tmp_path / "latest_checkpointed_iteration.txt", "200\n")
    assert locate(tmp_path).folder == tmp_path / "iter_0000200"
    assert locate(tmp_path).iteration == 200
    assert locate(tmp_path, "100").format is Format.TORCH_DIST
    assert locate(tmp_path / "iter_0000100").iteration == 100
    with pytest.raises(CheckpointError, match="has no iter_0000300; it has iter_0000100, iter_0000200"):
        locate(tmp_path, "300")


TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        *(
            ({"iter_0000100/.metadata": "", TRACKER: text}, rf"{TRACKER} holds .* choose one with")
            for text in ("", "12x", "../elsewhere", "²")
        ),
        ({"iter_0000100/.metadata": ""}, "choose one with --step"),
        (
            {"iter_0000100/__0_0.distcp": "", TRACKER: "100"},
            r"no \.metadata: .* not written to its end",
        ),
        ({"a": ""}, "holds no checkpoint"),
    ],
)
def test_a_folder_without_a_whole_checkpoint_is_refused(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        touch(tmp_path / name, text)
    with pytest.raises(CheckpointError, match=message):
        locate(tmp_path)


def test_a_run_means_its_newest_checkpoint(run: Path) -> None:
    newest = run / "checkpoints/step_000120/policy"
    for path in (run, run / "checkpoints", newest.parent, newest):
        assert (locate(path).folder, locate(path).iteration) == (newest, 120)
    assert locate(run, "20").iteration == 20
    with pytest.raises(CheckpointError, match=r"no step 30; it has \[20, 100, 120\]"):
        locate(run, "30")


def test_a_mid_step_checkpoint_is_newer_than_the_step_before_it(run: Path) -> None:
    """A run that was told to stop has such a checkpoint; ``--step`` means whole steps."""
    whole = run / "checkpoints/step_000120"
    within = whole.rename(whole.with_name("step_000100_update_003"))
    assert locate(run).folder == within / "policy"
    assert locate(run, "100").folder == run / "checkpoints/step_000100/policy"


def test_only_whole_checkpoints_of_a_run_count(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step_000120/policy/__0_0.distcp").write_text("short")
    assert locate(run).iteration == 100
    told = capsys.readouterr().err  # or step 100 would go out as the run's end
    assert told.startswith("passing over a newer checkpoint: ")
    assert "step_000120/policy/__0_0.distcp has 5 bytes instead of 3000000" in told
    for path, step in ((run, "120"), (run / "checkpoints/step_000120/policy", "latest")):
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 5 bytes instead of 3000000"):
            locate(path, step)
    (run / "checkpoints/step_000100/trainer.json").unlink()
    (run / "checkpoints/step_000020/manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)is whole.*trainer.json is missing.*manifest.json cannot be read"
    ):
        locate(run)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": [1]}', '{"files": {"a": 1}}', '{"files": {}}'])
def test_a_damaged_manifest_is_named(text: str, run: Path) -> None:
    (run / "checkpoints/step_000120/manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step_000120/manifest\.json"):
        locate(run, "120")


def test_what_is_no_folder_or_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        locate(tmp_path / "absent")
    with pytest.raises(ConfigError, match="--step newest: give latest or a number"):
        locate(tmp_path, "newest")


def test_a_checkpoint_of_verl_has_its_model_beside_it(tmp_path: Path) -> None:
    touch(tmp_path / "global_step_7/actor/dist_ckpt/.metadata")
    model = touch(tmp_path / "global_step_7/actor/huggingface/config.json").parent
    assert hf_reference(locate(tmp_path / "global_step_7/actor/dist_ckpt"), None) == model


def test_where_the_model_is_described(run: Path, tmp_path: Path) -> None:
    """In the checkpoint, beside it, or in the folder that the run started from; what is given comes first."""
    model, location = tmp_path / "model", locate(run)
    assert hf_reference(location, None) == model
    other = touch(tmp_path / "other/config.json").parent
    assert hf_reference(location, other) == other
    carried = touch(location.folder / "hf/config.json").parent
    assert hf_reference(location, None) == carried
    (model / "config.json").unlink()
    (carried / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"names the model .*/model, which is not there"):
        hf_reference(location, None)
    with pytest.raises(ConfigError, match=r"--hf-reference .*/model: no config.json there"):
        hf_reference(location, model)
    (run / "config.json").unlink()
    with pytest.raises(CheckpointError, match="carries no config.json of its model; name the model's"):
        hf_reference(location, None)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "hf", "qwen3", files=2)


def test_torch_dist(hf: Path, tmp_path: Path) -> None:
    to_megatron(hf, tmp_path / "megatron", grid=4)
    reshard(tmp_path / "megatron", tmp_path / "padded", vocabulary_multiple=64)
    found, padded = inspect_checkpoint(tmp_path / "megatron"), inspect_checkpoint(tmp_path / "padded")
    assert (found.format, found.layout) == ("torch_dist", "stacked")
    assert found.parameters == padded.parameters == inspect_checkpoint(hf).parameters
    groups = {group.key: group for group in found.keys}
    assert groups["decoder.layers.mlp.linear_fc1.weight"].shape == (3, 80, 48)
    assert groups["decoder.layers.mlp.linear_fc1.weight"].chunks == 3 * 2 * 4
    extra = groups["decoder.layers.mlp.linear_fc1._extra_state/shard_*_3"]
    assert (extra.dtype, extra.count) == ("object", 3)
    text = as_text(padded)
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
    assert "written at    TP8 PP4\n" in as_text(found)
    folder.rename(tmp_path / "iter_0000250")
    assert inspect_checkpoint(tmp_path / "iter_0000250").iteration == 250


@pytest.mark.parametrize(("expert", "text"), [(1, ""), (8, " EP8 ETP8")])
def test_what_the_trainer_says_of_its_layout(expert: int, text: str, hf: Path, tmp_path: Path) -> None:
    to_megatron(hf, tmp_path / "megatron")
    folder = tmp_path / "megatron/release"
    written = {"tensor": 2, "pipeline": 2, "virtual": 1, "context": 1, "data": 4}
    written |= {"expert": expert, "expert_tensor": expert, "pipeline_layers": [1, 3]}
    torch.save({"written_at": written}, folder / "common.pt")
    found = inspect_checkpoint(folder)
    assert found.written_at == written
    assert f"written at    TP2 PP2 VPP1 CP1 DP4{text}\n" in as_text(found)


def test_a_mixture_is_told_by_its_experts(tmp_path: Path) -> None:
    """`intermediate_size` of its config.json is the width of no layer."""
    text = as_text(inspect_checkpoint(save_random_model(tmp_path / "experts", EXPERTS)))
    assert "on 4 KV groups, 5 experts of 24, 2 for each token, vocabulary 101" in text


def test_mp_rank_folders(hf: Path, tmp_path: Path) -> None:
    save_legacy(hf, tmp_path / "legacy", tensor=2, pipeline=3)
    found = inspect_checkpoint(tmp_path / "legacy")
    assert (found.format, found.optimizer) == ("mp_rank", None)
    assert found.written_at == {"tensor": 2, "pipeline": 3, "virtual": 1}
    groups = {group.key: group for group in found.keys}
    assert groups["stage 2: decoder.layers.*.mlp.linear_fc1.weight"].shape == (40, 48)
    head = groups["stage 2: output_layer.weight"]
    assert (head.shape, head.count) == ((128, 48), 2)  # of both tensor ranks
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


def test_the_command(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(hf)]) == 0
    text = capsys.readouterr().out
    assert "format      HF\n" in text
    assert "Qwen3 dense: 3 layers, hidden 48, 8 heads of 24 on 4 KV groups, MLP 40, vocabulary 101" in text
    assert "  model.layers.*.mlp.gate_proj.weight  BF16 [40, 48] x 3\n" in text
    assert cli.run(["inspect", str(hf), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["family"] == "qwen3"
    head = {"key": "lm_head.weight", "dtype": "BF16", "shape": [101, 48], "count": 1, "chunks": 1}
    assert found["keys"][0] == head
    assert cli.run(["inspect", str(hf / "absent")]) == 2
    assert "absent is not a folder" in capsys.readouterr().err


def test_a_closed_pipe_ends_the_command_quietly(hf: Path) -> None:
    command = [sys.executable, "-m", "checkpoints_tools.cli", "inspect", str(hf)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    assert (child.stderr.read() if child.stderr else b"") == b""
    assert child.wait() == -signal.SIGPIPE
