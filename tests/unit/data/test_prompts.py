"""Reading a dataset file, what it says of broken ones, and the cursor."""

from __future__ import annotations

import copy
import json
import re
import socket
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.data.prompts import PromptOrder, check_template, load_prompts
from bapo_megatron.errors import ConfigError


class CharacterTokenizer:
    """One token a character, and a template that refuses the role ``tool``."""

    chat_template = "yes"

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        if any(message["role"] == "tool" for message in messages):
            raise RuntimeError("no tools here")
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(char) for char in text]

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "".join(chr(one) for one in ids)


def row(content: str = "1+1=", truth: Any = "2", **more: Any) -> dict[str, Any]:
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 0},
        **more,
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train [1].jsonl"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_rows_become_prompts(file: Path) -> None:
    rows = [
        row("1+1=", "2", extra_info={"index": 7, "model_difficulty": {"a": 3}}),
        row("x" * 30, "9"),
        row("2+2=", '["4"]', extra_info={"other": "é"}),
        row("3+3=", r"\frac{12}{2}", extra_info=None),
    ]
    found = load_prompts(write(file, rows), CharacterTokenizer(), 10)
    assert found.too_long == 1
    assert [p.prompt_id for p in found.prompts] == [0, 2, 3]
    assert [p.ground_truth for p in found.prompts] == ["2", "4", r"\frac{12}{2}"]
    assert found.prompts[0].token_ids_P.dtype == np.int32
    assert found.prompts[0].token_ids_P.tolist() == [ord(char) for char in "1+1="]
    assert [p.extra_info for p in found.prompts] == [
        {"index": 7, "model_difficulty": {"a": 3}},
        {"other": "é"},
        {},
    ]
    assert {p.data_source for p in found.prompts} == {"test"}


def test_parquet_reads_the_same(tmp_path: Path, file: Path) -> None:
    rows = [row("1+1=", "2", extra_info={"a": 1}), row("2+2=", "4", extra_info={"b": "x"})]
    parquet = tmp_path / "train.parquet"
    datasets.Dataset.from_list(copy.deepcopy(rows)).to_parquet(str(parquet))
    one = load_prompts(write(file, rows), CharacterTokenizer(), 10).prompts
    other = load_prompts(parquet, CharacterTokenizer(), 10).prompts
    for left, right in zip(one, other, strict=True):
        assert left.token_ids_P.tolist() == right.token_ids_P.tolist()
        assert left.extra_info == right.extra_info
        assert left.ground_truth == right.ground_truth


def test_dates_stay_the_texts_that_they_are(file: Path) -> None:
    """Arrow makes times of them: an answer was not text then, and a column had a clock that nobody wrote."""
    rows = [row(f"q{n}", f"2024-01-0{n}", extra_info={"day": f"2023-02-0{n}"}) for n in (1, 2)]
    found = load_prompts(write(file, rows), CharacterTokenizer(), 9).prompts
    assert [one.ground_truth for one in found] == ["2024-01-01", "2024-01-02"]
    assert [one.extra_info["day"] for one in found] == ["2023-02-01", "2023-02-02"]


def test_nothing_is_left_behind(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = sorted(cache.rglob("*")) if cache.exists() else []
    load_prompts(write(file, [row()]), CharacterTokenizer(), 10)
    assert list(temporary.iterdir()) == []
    assert (sorted(cache.rglob("*")) if cache.exists() else []) == before
    assert capfd.readouterr() == ("", "")


BROKEN_ROWS: dict[str, tuple[Any, str]] = {
    "no ground truth": (row(reward_model={"style": "rule"}), "ground_truth is None"),
    "no reward model": ({k: v for k, v in row().items() if k != "reward_model"}, "reward_model is missing"),
    "empty ground truth": (row(truth=" "), "ground_truth is ' '"),
    "fraction as ground truth": (row(truth=5.5), "ground_truth is 5.5; it must be the answer as text"),
    "object as ground truth": (row(truth={"target": 5}), "a reward function of yours takes any JSON value"),
    "two answers": (row(truth='["1", "2"]'), "2 answers"),
    "no prompt": (row(prompt=None), "prompt is missing"),
    "empty prompt": (row(prompt=[]), "prompt is empty"),
    "prompt as text": (row(prompt="1+1="), "prompt is of type str"),
    "empty content": (row(content="  "), "content is '  '"),
    "no role": (row(prompt=[{"content": "1+1="}]), "role is None"),
    "role the template refuses": (row(prompt=[{"role": "tool", "content": "x"}]), "no tools here"),
    "no data source": (row(data_source=None), "data_source is missing"),
    "extra info as text": (row(extra_info="x"), "extra_info is of type str"),
}


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_a_broken_row_is_named(file: Path, name: str) -> None:
    broken, says = BROKEN_ROWS[name]
    with pytest.raises(ConfigError, match=re.escape(says)) as error:
        load_prompts(write(file, [row(), row(), broken]), CharacterTokenizer(), 10, lambda _: None)
    assert str(file) in str(error.value)
    assert "row 2" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize("truth", ["[1, 2]", '["a', "[0, 1)", '{"a": 1}', '["x"] or so', "['a", "['x', y]"])
def test_ground_truths_that_only_look_like_json_stay(file: Path, truth: str) -> None:
    (prompt,) = load_prompts(write(file, [row(truth=truth)]), CharacterTokenizer(), 10).prompts
    assert prompt.ground_truth == truth


OWN_TRUTHS: list[tuple[Any, str]] = [
    (5, "5"),
    (0.5, "0.5"),
    (True, "true"),
    ({"target": 24, "numbers": [4, 6]}, '{"target": 24, "numbers": [4, 6]}'),
    ([3, 4], "[3, 4]"),
]


@pytest.mark.parametrize(("truth", "text"), OWN_TRUTHS, ids=[text for _, text in OWN_TRUTHS])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_reward_of_ones_own_takes_any_ground_truth_as_json(
    tmp_path: Path, ending: str, truth: Any, text: str
) -> None:
    path = tmp_path / f"rows{ending}"
    if ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(truth=truth)]), path)
    else:
        write(path, [row(truth=truth)])
    (prompt,) = load_prompts(path, CharacterTokenizer(), 10).prompts
    assert prompt.ground_truth == text


@pytest.mark.parametrize("truth", [float("nan"), {"target": None}])
def test_a_missing_value_is_no_ground_truth(tmp_path: Path, truth: Any) -> None:
    """As pandas and Arrow fill rows without one: a reward would compare with it, and nobody be told."""
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(truth=truth)]), path)
    with pytest.raises(
        ConfigError, match=r"row 0 .*ground_truth is .*; it must be the answer as text, not empty"
    ):
        load_prompts(path, CharacterTokenizer(), 10)


def test_prompts_about_images_are_refused_unless_the_run_has_begun(tmp_path: Path) -> None:
    """verl's files need no `bapo data prepare`; rows without an image may name its place."""
    path, shows = tmp_path / "rows.parquet", [{"bytes": b"\x00", "path": "a.png"}]
    rows = [row("<image>?", images=[]), row("1+1=", images=shows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert len(load_prompts(path, CharacterTokenizer(), 10).prompts) == 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows, row("<image>!", images=shows)]), path)
    with pytest.raises(
        ConfigError, match=r"row 2 .*its prompt is about its images, and models here read text"
    ):
        load_prompts(path, CharacterTokenizer(), 10)
    assert len(load_prompts(path, CharacterTokenizer(), 10, begun=True).prompts) == 3


def test_whole_numbers_are_answers_for_every_reward(file: Path) -> None:
    """Texts beside them stay as they are written: the loader would make 5 of 05, and 1000.0 of 1e3."""
    path = write(file, [row("a", truth="05"), row("b", truth=5), row("c", truth="1e3")])
    found = load_prompts(path, CharacterTokenizer(), 10, lambda _: None).prompts
    assert [prompt.ground_truth for prompt in found] == ["05", "5", "1e3"]


def test_objects_of_other_rows_leave_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row("a", truth={"a": 1}), row("b", truth={"b": 2})]), path
    )
    found = load_prompts(path, CharacterTokenizer(), 10).prompts
    assert [prompt.ground_truth for prompt in found] == ['{"a": 1}', '{"b": 2}']


def test_a_list_that_was_written_as_python(file: Path) -> None:
    r"""As tables have them. math-verify would read two answers as an interval."""
    path = write(file, [row(truth="['\\\\frac{1}{2}']")])
    (judged,) = load_prompts(path, CharacterTokenizer(), 10, lambda _: None).prompts
    assert judged.ground_truth == "\\frac{1}{2}"
    (own,) = load_prompts(path, CharacterTokenizer(), 10).prompts
    assert own.ground_truth == "['\\\\frac{1}{2}']"


def test_a_template_that_opens_the_thinking_part(file: Path) -> None:
    rows = [row("1<think>\n"), row("<think>1</think>"), row("1+1=")]
    found = load_prompts(write(file, rows), CharacterTokenizer(), 20).prompts
    assert [prompt.opens_thinking for prompt in found] == [True, False, False]


def test_ground_truths_are_checked(file: Path) -> None:
    rows = [row(), row(truth="???")]
    with pytest.raises(ConfigError, match=r"row 1 .*ground_truth: no sense"):
        load_prompts(write(file, rows), CharacterTokenizer(), 10, lambda t: "no sense" if "?" in t else None)


def test_broken_files(file: Path, tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer()
    with pytest.raises(ConfigError, match="no such file"):
        load_prompts(file, tokenizer, 10)
    file.write_text("")
    with pytest.raises(ConfigError, match="no rows"):
        load_prompts(file, tokenizer, 10)
    file.write_text(json.dumps(row()) + "\n{broken\n")
    with pytest.raises(ConfigError, match=r"row 1 .*not JSON"):
        load_prompts(file, tokenizer, 10)
    needed = r"each of its 2 prompts .*max_prompt_tokens=3 tokens; raise that: the shortest has (\d+), "
    with pytest.raises(ConfigError, match=needed) as raised:
        load_prompts(write(file, [row("22+22="), row()]), tokenizer, 3)
    shortest, longest = map(int, re.findall(r"has (\d+), the longest (\d+)$", str(raised.value))[0])
    assert longest == shortest + 2
    assert len(load_prompts(file, tokenizer, shortest).prompts) == 1
    other = tmp_path / "data.csv"
    other.write_text("a,b\n")
    with pytest.raises(ConfigError, match="unknown ending"):
        load_prompts(other, tokenizer, 10)
    parquet = tmp_path / "data.parquet"
    parquet.write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(parquet, tokenizer, 10)
    with pytest.raises(ConfigError, match="chat_template"):
        load_prompts(write(file, [row()]), object(), 10)


@given(
    size=st.integers(1, 20),
    seed=st.integers(-(2**40), 2**40),
    shuffle=st.booleans(),
    takes=st.lists(st.integers(0, 50), max_size=6),
)
def test_every_prompt_exactly_once_an_epoch(size: int, seed: int, shuffle: bool, takes: list[int]) -> None:
    order, taken, pieces = PromptOrder(size, seed, shuffle), 0, []
    for count in takes:
        pieces += order.take(taken, count)
        taken += count
    assert pieces == PromptOrder(size, seed, shuffle).take(0, sum(takes))
    for start in range(0, len(pieces) - size + 1, size):
        epoch = pieces[start : start + size]
        assert {e for e, _ in epoch} == {start // size}
        assert sorted(index for _, index in epoch) == list(range(size))


@given(size=st.integers(1, 20), before=st.integers(0, 60), after=st.integers(0, 60))
def test_a_place_is_one_number(size: int, before: int, after: int) -> None:
    order = PromptOrder(size, 3, True)
    assert order.take(0, before + after)[before:] == PromptOrder(size, 3, True).take(before, after)


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [index for e, index in PromptOrder(50, seed, True).take(0, 100) if e == epoch]

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert PromptOrder(3, 0, False).take(0, 4) == [(0, 0), (0, 1), (0, 2), (1, 0)]


class Deaf(CharacterTokenizer):
    """A template that ignores the messages."""

    def apply_chat_template(self, *_: object, **__: object) -> str:
        return "789"


def test_equal_prompts_throughout_are_refused(file: Path) -> None:
    different = [{**row(), "prompt": [{"role": "user", "content": text}]} for text in ("1+1=", "1+2=")]
    write(file, different)
    assert len(load_prompts(file, CharacterTokenizer(), 10).prompts) == 2
    with pytest.raises(ConfigError, match="equal prompts throughout: all 2 rows become the same 3 tokens"):
        load_prompts(file, Deaf(), 10)
    write(file, different[:1])  # one problem is a task
    assert len(load_prompts(file, Deaf(), 10).prompts) == 1
    write(file, [different[0], *different])  # so are repeated ones beside another
    assert len(load_prompts(file, CharacterTokenizer(), 10).prompts) == 3


def test_a_template_that_ignores_the_messages_is_refused() -> None:
    check_template(CharacterTokenizer(), "tokenizer=x")
    with pytest.raises(ConfigError, match=r"^tokenizer=x: its chat_template ignores the messages"):
        check_template(Deaf(), "tokenizer=x")
