"""Bad input ends at once: exit code 2, one clear message, and no process group was ever made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bapo_megatron import cli

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/demo_cpu.py")
POLICY = ROOT / "recipes/demo/policy"
ROW = {
    "data_source": "test",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process group was made")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr("bapo_megatron.runtime.distributed.start_processes", refuse)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(POLICY, tmp_path / "model"))


def message_of(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
    """What ``bapo`` prints on stderr, given that it refuses."""
    try:
        code = cli.run(["train", *arguments, f"--run-dir={tmp_path / 'run'}"])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert not (tmp_path / "run").exists()
    printed = capsys.readouterr()
    return printed.err + printed.out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--steps=0"], "steps=0 must be at least 1"),
        (["--algorithm.loss=ppo"], "algorithm.loss='ppo' is unknown: give "),
        (["--algorithm.loss=nowhere:Loss"], "algorithm.loss=nowhere:Loss: importing nowhere failed"),
        (
            ["--algorithm.loss=cispo", "--algorithm.bounds.target=0.5"],
            "algorithm.loss=cispo does not read that",
        ),
        (
            ["--algorithm.loss=sapo", '--algorithm.loss-settings={"temperature": 2}'],
            "algorithm.loss_settings.temperature=2: algorithm.loss=sapo has no such setting",
        ),
        (["--algorithm.loss-settings=[1]"], "[1] is not a JSON object"),
        (["--steps=many"], "many"),
        (["--optimiser.lr=1"], "--optimizer.lr"),
        (["--rollout.group_sise=4"], "--rollout.group-size"),
        (["--data.path=missing.jsonl"], "data.path=missing.jsonl"),
        (["--model.hf-path=missing"], "missing: no config.json there"),
        (["--parallel.tensor=3"], "parallel.tensor=3 does not divide"),
        (["--parallel.pipeline=5"], "5 x 1 makes 5 model chunks of the model's 4 layers"),
        (
            ["--parallel.context=2", "--rollout.max-response-tokens=63", "--batch.pack-tokens=111"],
            "rounded up to a multiple of 4",
        ),
        (["--batch.hold-forwards", "--parallel.pipeline=2"], "batch.hold_forwards needs parallel.pipeline=1"),
        (["--parallel.sequence", "--parallel.tensor=1"], "parallel.sequence needs parallel.tensor"),
        (
            ["--parallel.pipeline=2", "--parallel.pipeline-layers", "2", "1"],
            "parallel.pipeline_layers=2 1 are 3 layers, but the model has 4",
        ),
        (["--algorithm.bounds.low-end=0.1"], "algorithm.bounds.low_end=0.1"),
        (["--algorithm.bounds.target=2"], "algorithm.bounds.target=2"),
        (["--rollout.max-response-tokens=500"], "max_position_embeddings (256)"),
        (["--rollout.replay=missing"], "rollout.replay=missing holds no journal"),
        (["--logging.trackers", "mlflow"], "logging.trackers: mlflow is not installed"),
        (["--logging.wandb-project=x"], "logging.trackers: wandb is not installed"),
    ],
)
def test_a_bad_flag(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert expected in message_of(capsys, tmp_path, RECIPE, *flags)


def test_a_recipe_without_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("")
    assert "defines no function recipe()" in message_of(capsys, tmp_path, str(path))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"reward_model": {"style": "rule"}}, "ground_truth"),
        ({"reward_model": {"ground_truth": "two???{"}}, "cannot read"),
        ({"prompt": []}, "prompt is empty"),
    ],
)
def test_a_bad_row(change: dict, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (ROW, {**ROW, **change})))
    message = message_of(capsys, tmp_path, RECIPE, f"--data.path={path}")
    assert "row 1" in message
    assert expected in message


def test_a_missing_tensor(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    message = message_of(capsys, tmp_path, RECIPE, f"--model.hf-path={model}")
    assert "tensor model.layers.2.mlp.up_proj.weight is missing" in message


def test_a_tokenizer_of_another_model(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:256].clone()
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    message = message_of(capsys, tmp_path, RECIPE, f"--model.hf-path={model}")
    assert "ids up to 263, but the model's vocab_size is 256" in message


def test_a_folder_without_tokenizer(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert "holds no tokenizer" in message_of(capsys, tmp_path, RECIPE, f"--model.hf-path={model}")


def test_the_wrong_number_of_processes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    message = message_of(capsys, tmp_path, RECIPE, "--parallel.tensor=2")
    assert "start a multiple of 2" in message


def test_half_a_launcher(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "MASTER_ADDR, MASTER_PORT is not" in message_of(capsys, tmp_path, RECIPE)


def test_an_output_that_is_no_model_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    recipe = tmp_path / "warm.py"
    recipe.write_text(
        "from pathlib import Path\n"
        "from bapo_megatron.config import DataConfig, ModelConfig, SftConfig\n"
        f"def recipe():\n    return SftConfig(ModelConfig(Path({str(POLICY)!r})), "
        f"DataConfig(Path({str(ROOT / 'recipes/demo/train.jsonl')!r})), Path({str(tmp_path)!r}))\n"
    )
    assert cli.run(["sft", str(recipe)]) == 2
    assert "has no .bapo-written.json" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_replay_of_a_shorter_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other/journal").mkdir(parents=True)
    message = message_of(capsys, tmp_path, RECIPE, f"--rollout.replay={tmp_path / 'other'}", "--steps=3")
    assert "has no rollouts of step 1, but steps=3" in message
