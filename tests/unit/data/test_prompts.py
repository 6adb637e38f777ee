"""Files of rows, which `bapo train` and `bapo data prepare` read or refuse alike; prompts; the cursor."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.data.prepare.sources import hub_source, open_source
from bapo_megatron.data.prompts import PromptOrder, load_prompts
from bapo_megatron.data.rows import read_rows
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
    about: dict[str, Any] = {"data_source": "test", "extra_info": {"index": 0}}
    about["reward_model"] = {"ground_truth": truth, "style": "rule"}
    return {**about, "prompt": [{"role": "user", "content": content}], **more}


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train [1].jsonl"


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
    assert [p.extra_info for p in found.prompts] == [rows[0]["extra_info"], {"other": "é"}, {}]
    assert {p.data_source for p in found.prompts} == {"test"}


BROKEN_ROWS: dict[str, tuple[Any, str]] = {
    "no ground truth": (row(reward_model={"style": "rule"}), "ground_truth is None"),
    "no reward model": ({k: v for k, v in row().items() if k != "reward_model"}, "reward_model is missing"),
    "empty ground truth": (row(truth=" "), "ground_truth is ' '"),
    "fraction as ground truth": (row(truth=5.5), "ground_truth is 5.5; it must be the answer as text"),
    "object as ground truth": (row(truth={"target": 5}), "ground_truth is {'target': 5}"),
    "two answers": (row(truth='["1", "2"]'), "2 answers"),
    "no prompt": (row(prompt=None), "prompt is missing"),
    "empty prompt": (row(prompt=[]), "prompt is empty"),
    "message as text": (row(prompt=["1+1="]), "a message must be {role, content}"),
    "prompt as text": (row(prompt="1+1="), "prompt is of type str"),
    "empty content": (row(content="  "), "content is '  '"),
    "no role": (row(prompt=[{"content": "1+1="}]), "role is None"),
    "role the template refuses": (row(prompt=[{"role": "tool", "content": "x"}]), "no tools here"),
    "extra info as text": (row(extra_info="x"), "extra_info is of type str"),
    "what a check refuses": (row(truth="???"), "ground_truth: no sense"),
}


def checked(truth: str) -> str | None:
    return "no sense" if "?" in truth else None


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_a_broken_row_is_named(file: Path, name: str) -> None:
    broken, says = BROKEN_ROWS[name]
    with pytest.raises(ConfigError, match=rf"{re.escape(str(file))}.*row 2.*{re.escape(says)}"):
        load_prompts(write(file, [row(), row(), broken]), CharacterTokenizer(), 10, checked)


@pytest.mark.parametrize("truth", ["[1, 2]", '["a', "[0, 1)", '{"a": 1}', '["x"] or so', "['a", "['x', y]"])
def test_ground_truths_that_only_look_like_json_stay(file: Path, truth: str) -> None:
    (prompt,) = load_prompts(write(file, [row(truth=truth)]), CharacterTokenizer(), 10).prompts
    assert prompt.ground_truth == truth


COUNTDOWN = {"target": 24, "numbers": [4, 6]}
OWN_TRUTHS = {"5": 5, "0.5": 0.5, "true": True, "[3, 4]": [3, 4], json.dumps(COUNTDOWN): COUNTDOWN}


@pytest.mark.parametrize(("text", "truth"), OWN_TRUTHS.items(), ids=OWN_TRUTHS)
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_reward_of_ones_own_takes_any_ground_truth_as_json(
    tmp_path: Path, ending: str, truth: Any, text: str
) -> None:
    path = write(tmp_path / f"rows{ending}", [row(truth=truth)])
    (prompt,) = load_prompts(path, CharacterTokenizer(), 10).prompts
    assert prompt.ground_truth == text


@pytest.mark.parametrize("truth", [float("nan"), {"target": None}])
def test_a_missing_value_is_no_ground_truth(tmp_path: Path, truth: Any) -> None:
    """As pandas and Arrow fill rows without one: a reward would compare with it, and nobody be told."""
    with pytest.raises(ConfigError, match=r"row 0 .*ground_truth is "):
        load_prompts(write(tmp_path / "rows.parquet", [row(truth=truth)]), CharacterTokenizer(), 10)


def test_prompts_about_images_are_refused_unless_the_run_has_begun(tmp_path: Path) -> None:
    """verl's files need no `bapo data prepare`; rows without an image may name its place."""
    path, shows = tmp_path / "rows.parquet", [{"bytes": b"\x00", "path": "a.png"}]
    rows = [row("<image>?", images=[]), row("1+1=", images=shows)]
    assert len(load_prompts(write(path, rows), CharacterTokenizer(), 10).prompts) == 2
    write(path, [*rows, row("<image>!", images=shows)])
    with pytest.raises(ConfigError, match=r"row 2 .*about its images"):
        load_prompts(path, CharacterTokenizer(), 10)
    assert len(load_prompts(path, CharacterTokenizer(), 10, begun=True).prompts) == 3


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


def test_prompts_that_are_all_too_long_say_what_would_do(file: Path) -> None:
    tokenizer = CharacterTokenizer()
    needed = r"each of its 2 prompts .*max_prompt_tokens=3 tokens; raise that: the shortest has (\d+), "
    with pytest.raises(ConfigError, match=needed) as raised:
        load_prompts(write(file, [row("22+22="), row()]), tokenizer, 3)
    shortest, longest = map(int, re.findall(r"has (\d+), the longest (\d+)$", str(raised.value))[0])
    assert longest == shortest + 2
    assert len(load_prompts(file, tokenizer, shortest).prompts) == 1
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


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(PromptOrder(50, seed, True).take(start, 50)) for seed in (0, 1) for start in (0, 50)}
    assert len({tuple(index for _, index in order) for order in orders}) == 4
    assert PromptOrder(3, 0, False).take(0, 4) == [(0, 0), (0, 1), (0, 2), (1, 0)]


class Deaf(CharacterTokenizer):
    """A template that ignores the messages."""

    def apply_chat_template(self, *_: object, **__: object) -> str:
        return "789"


def test_equal_prompts_throughout_are_refused(file: Path) -> None:
    different = [row("1+1="), row("1+2=")]
    write(file, different)
    with pytest.raises(ConfigError, match="equal prompts throughout: all 2 rows become the same 3 tokens"):
        load_prompts(file, Deaf(), 10)
    write(file, different[:1])  # one problem is a task
    assert len(load_prompts(file, Deaf(), 10).prompts) == 1
    write(file, [different[0], *different])  # so are repeated ones beside another
    assert len(load_prompts(file, CharacterTokenizer(), 10).prompts) == 3


ROWS: list[dict[str, Any]] = [
    {"a": 34, "day": "2024-01-05", "mixed": "05", "of": {"x": 1, "deep": [{"y": 1}]}},
    {"a": None, "day": "é", "mixed": 5, "of": {"z": None, "deep": [{"w": "t"}]}},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LIST = json.dumps(ROWS, indent=1).encode()
MARK = b"\xef\xbb\xbf"

FILES = {
    "lines": ("rows.jsonl", LINES),
    "a list": ("rows.json", LIST),
    "lines in .json": ("rows.json", LINES),
    "a list in .jsonl": ("rows.jsonl", LIST),
    "a mark of the byte order": ("rows.jsonl", MARK + LINES),
    "empty lines": ("rows.jsonl", b"\n \n" + LINES.replace(b"\n", b"\r\n\r\n")),
    "objects over several lines": (
        "rows.jsonl",
        b"\n".join(json.dumps(row, indent=2).encode() for row in ROWS),
    ),
    "objects without a space": ("rows.jsonl", b"".join(LINES.splitlines())),
    "gzip by its name": ("rows.jsonl.gz", gzip.compress(MARK + LINES)),
    "a list by gzip": ("rows.json.gz", gzip.compress(LIST)),
}


def prepare_reads(path: Path) -> list[Any]:
    return list(open_source(str(path), "train", None).rows())


@pytest.mark.parametrize("name", FILES)
def test_runs_and_preparation_read_the_same_rows(name: str, tmp_path: Path) -> None:
    file, content = FILES[name]
    path = tmp_path / file
    path.write_bytes(content)
    assert read_rows(path) == ROWS
    assert prepare_reads(path) == ROWS


BROKEN = {
    "no rows": ("rows.jsonl", b"\n", "the file has no rows"),
    "an empty list": ("rows.json", b"[]", "the file has no rows"),
    "no object": ("rows.jsonl", LINES + b"5\n", "row 2 (the first is 0): it is not an object: 5"),
    "no object in a list": ("rows.json", b"[{}, 5]", "row 1 (the first is 0): it is not an object: 5"),
    "an open list": ("rows.json", LIST[:-1], "row 0 (the first is 0): not JSON: Expecting ',' delimiter"),
    "a cut line among others": ("rows.jsonl", LINES[:-3] + b"\n" + LINES, "row 1 (the first is 0): not JSON"),
    "half an object over several lines": (
        "rows.json",
        json.dumps(ROWS[0], indent=1).encode()[:-1],
        "not JSON: Expecting ',' delimiter: line 13 column 1",
    ),
    "half a line": ("rows.jsonl", LINES[:-5], "row 1 (the first is 0): not JSON: Expecting"),
    "another encoding": ("rows.jsonl", LINES.decode().encode("utf-16"), "not JSON: 'utf-8' codec"),
    "an end too early": ("rows.jsonl", gzip.compress(LINES)[:-9], "cannot be read: Compressed file"),
    "no parquet": ("rows.parquet", LINES, "cannot be read as parquet"),
    "another ending": ("rows.parquet.gz", b"", "unknown ending; give one of .jsonl, .json, .parquet"),
    "brackets of a parser's nightmare": ("rows.jsonl", b"[" * 100_000 + b"\n", "row 0 (the first is 0): not"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_runs_and_preparation_refuse_a_file_in_the_same_words(name: str, tmp_path: Path) -> None:
    file, content, says = BROKEN[name]
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(says)) as prepared:
        prepare_reads(path)
    with pytest.raises(ConfigError, match=re.escape(says)) as run:
        read_rows(path)
    assert str(prepared.value).startswith(str(path))
    assert str(run.value) == f"data.path={prepared.value}"


OBJECTS: list[dict[str, Any]] = [
    {"meta": {"y": "t"}, "truths": [{"a": 1}], "none": None},
    {"meta": {"x": {"u": 1}}, "truths": [{"b": [None, 2]}], "none": {"k": 0}},
]
"""Objects with keys of their own. Arrow has one type for all of them."""


def test_objects_in_columns_have_the_keys_of_their_own_row(tmp_path: Path) -> None:
    parquet, lines = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    table = pyarrow.Table.from_pylist(OBJECTS)
    pyarrow.parquet.write_table(table, parquet)
    lines.write_text("".join(json.dumps(row) + "\n" for row in OBJECTS))
    assert table.to_pylist()[0]["meta"] == {"y": "t", "x": None}
    assert read_rows(parquet) == prepare_reads(parquet) == read_rows(lines) == OBJECTS
    assert list(hub_source("", datasets.Dataset(table)).rows()) == OBJECTS


@pytest.mark.parametrize("many", [pyarrow.list_, pyarrow.large_list, lambda of: pyarrow.list_(of, 1)])
def test_objects_in_every_kind_of_list_have_their_own_keys(many: Any, tmp_path: Path) -> None:
    path, kind = tmp_path / "rows.parquet", many(pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.int64()}))
    expected = [{"of": [{"a": 1}]}, {"of": [{"b": 2}]}]
    column = pyarrow.array([row["of"] for row in expected], kind)
    pyarrow.parquet.write_table(pyarrow.table({"of": column}), path)
    assert read_rows(path) == expected


def test_columns_of_json_are_what_they_say(tmp_path: Path) -> None:
    """``datasets`` writes them for values of several types; elsewhere in a row, too."""
    path, kind = tmp_path / "rows.parquet", pyarrow.json_()
    texts = pyarrow.ExtensionArray.from_storage(kind, pyarrow.array(['{"x": 1}', None, "[2]"]))
    nested = pyarrow.StructArray.from_arrays([texts], ["args"])
    pyarrow.parquet.write_table(pyarrow.table({"of": texts, "call": nested}), path)
    expected = [{"of": {"x": 1}, "call": {"args": {"x": 1}}}, {"of": None, "call": {}}]
    assert read_rows(path) == prepare_reads(path) == [*expected, {"of": [2], "call": {"args": [2]}}]


class Attack:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("name", ["arrow.py_extension_type", "pyarrow.py_extension_type", "other"])
def test_no_pickled_type_of_a_parquet_file_runs(name: str, tmp_path: Path) -> None:
    """Arrow once unpickled the types that a file names (CVE-2023-47248)."""
    path, proof = tmp_path / "rows.parquet", tmp_path / "proof"
    about = {"ARROW:extension:name": name, "ARROW:extension:metadata": pickle.dumps(Attack(proof))}
    schema = pyarrow.schema([pyarrow.field("prompt", pyarrow.string(), metadata=about)])
    pyarrow.parquet.write_table(pyarrow.table([["a"]], schema=schema), path)
    assert read_rows(path) == prepare_reads(path) == [{"prompt": "a"}]
    assert not proof.exists()
