"""Resolution of a path to a checkpoint, and paths that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo_megatron.checkpoint.run_directory import FORMAT
from bapo_megatron.errors import CheckpointError, ConfigError
from checkpoints_tools.formats.locate import Format, hf_reference, locate


def touch(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def make_step(run: Path, step: int) -> Path:
    """A checkpoint of a run, as far as its files' names and sizes go."""
    folder = run / f"checkpoints/step_{step:06d}"
    files = {"policy/.metadata": "metadata", "policy/__0_0.distcp": "weights" * step, "trainer.json": "{}"}
    for name, text in files.items():
        touch(folder / name, text)
    sizes = {name: {"bytes": len(text), "sha256": ""} for name, text in files.items()}
    touch(folder / "manifest.json", json.dumps({"step": step, "files": sizes}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (20, 100, 120):
        make_step(tmp_path / "run", step)
    touch(tmp_path / "run/checkpoints/.step_000140.tmp/policy/.metadata")
    model = touch(tmp_path / "model/config.json", "{}").parent
    config = {"format": FORMAT, "config": {"model.hf_path": str(model)}}
    touch(tmp_path / "run/config.json", json.dumps(config))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (".metadata", Format.TORCH_DIST),
        ("mp_rank_00/model_optim_rng.pt", Format.MP_RANK),
        ("model-00001-of-00002.safetensors", Format.HF),
    ],
)
def test_plain_folders_are_known_by_their_files(file: str, found: Format, tmp_path: Path) -> None:
    touch(tmp_path / "any" / file)
    location = locate(tmp_path / "any")
    assert (location.folder, location.format, location.iteration) == (tmp_path / "any", found, None)


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


def test_a_release_has_no_iteration(tmp_path: Path) -> None:
    touch(tmp_path / "release/.metadata")
    touch(tmp_path / "latest_checkpointed_iteration.txt", "release")
    assert (locate(tmp_path).folder, locate(tmp_path).iteration) == (tmp_path / "release", None)


@pytest.mark.parametrize("text", ["", "12x", "../elsewhere", "²"])
def test_a_damaged_tracker_is_named(text: str, tmp_path: Path) -> None:
    touch(tmp_path / "iter_0000100/.metadata")
    touch(tmp_path / "latest_checkpointed_iteration.txt", text)
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt holds .* choose one with"):
        locate(tmp_path)


def test_an_iteration_without_a_tracker_must_be_chosen(tmp_path: Path) -> None:
    touch(tmp_path / "iter_0000100/.metadata")
    with pytest.raises(CheckpointError, match="choose one with --step"):
        locate(tmp_path)
    assert locate(tmp_path, "100").iteration == 100


def test_an_unfinished_iteration_is_skipped(tmp_path: Path) -> None:
    touch(tmp_path / "iter_0000100/__0_0.distcp")
    touch(tmp_path / "latest_checkpointed_iteration.txt", "100")
    with pytest.raises(CheckpointError, match=r"no \.metadata: the checkpoint was not written to its end"):
        locate(tmp_path)
    (tmp_path / "iter_0000100/__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="iter_0000100 holds no weights"):
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
    assert "step_000120/policy/__0_0.distcp has 5 bytes instead of 840" in told
    for path, step in ((run, "120"), (run / "checkpoints/step_000120/policy", "latest")):
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 5 bytes instead of 840"):
            locate(path, step)
    (run / "checkpoints/step_000100/trainer.json").unlink()
    (run / "checkpoints/step_000020/manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)is whole.*trainer.json is missing.*manifest.json is missing"
    ):
        locate(run)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": [1]}', '{"files": {"a": 1}}', '{"files": {}}'])
def test_a_damaged_manifest_is_named(text: str, run: Path) -> None:
    (run / "checkpoints/step_000120/manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step_000120/manifest\.json"):
        locate(run, "120")


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        locate(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
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
    (run / "config.json").write_text('{"config": {"model.hf_path": "models/small"}}')
    with pytest.raises(
        CheckpointError,
        match=r"names the model models/small, which is not there as seen from /.*: go to where the run began",
    ):
        hf_reference(location, None)
    (run / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"carries no config.json of its model; name the model's folder"
    ):
        hf_reference(location, None)
