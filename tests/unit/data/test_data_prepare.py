"""`bapo data prepare`: schemas, normal forms, filters, and the folder that comes out.

All problems here were made up for these tests; the fields are those of the public datasets.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from bapo_megatron.cli import run
from bapo_megatron.data.prepare import sources
from bapo_megatron.data.prepare.command import prepare
from bapo_megatron.data.prepare.options import CARD_FILE, CARD_TEXT, DATA_FILE, PrepareOptions
from bapo_megatron.data.prompts import load_prompts
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.functions import ground_truth_check
from tests.support.preparation import GOATS, MODEL, TESTS, kept, prepared, skywork, write


def test_a_reward_of_ones_own_takes_any_text(tmp_path: Path) -> None:
    """The module is on the machines of the run; prompts stay as they are."""
    asked, text, listed = "The capital?", "Paris, the city of light", '["1", "2"]'
    rows = [{"question": asked, "answer": text}, {"question": "Two?", "answer": listed}]
    rows += [{"question": "Both?", "answer": ["1", "2"]}, skywork(GOATS, "19")]
    card = prepared(tmp_path, rows, reward="my_rewards:same_words")
    assert not card.as_json()["options"]["instruct"]  # no sentence is added
    row, _, _, named = kept(tmp_path)
    assert (row["prompt"], row["ability"]) == ([{"role": "user", "content": asked}], "other")
    assert named["ability"] == "math"  # a kind that a row names stays
    data = tmp_path / "out" / DATA_FILE
    found = load_prompts(data, load_tokenizer(MODEL), 400).prompts
    assert [one.ground_truth for one in found] == [text, listed, listed, "19"]
    with pytest.raises(ConfigError, match="2 answers; give one"):
        load_prompts(data, load_tokenizer(MODEL), 400, ground_truth_check("math"))


def test_a_run_says_how_raw_rows_are_prepared(tmp_path: Path) -> None:
    source = write(tmp_path / "raw.jsonl", [{"Question": GOATS, "answer": "19"}])
    with pytest.raises(ConfigError, match="Question, answer: `bapo data prepare FILE --output DIR`"):
        load_prompts(Path(source), load_tokenizer(MODEL), 64)


LOOP = json.dumps(["assert all(f(i) == i for i in range(3))"])


OPERATIONS = ["120", r"\binom{10}{3}", "2^{10}", r"\sqrt{2}", "n(n+1)", "12-7"]


@pytest.mark.parametrize(
    ("rows", "field", "count", "told"),
    [
        ([skywork("f", LOOP), skywork("g", TESTS)], "forgeable", 1, "forge (docs/rewards.md#programs)"),
        ([skywork(f"{n}?", one) for n, one in enumerate(OPERATIONS)], "operation", 3, "operation (docs/rew"),
    ],
    ids=["forgeable", "operations"],
)
def test_rows_to_look_at_are_counted(
    tmp_path: Path, rows: list[Any], field: str, count: int, told: str
) -> None:
    card = prepared(tmp_path, rows)
    assert card.as_json()[f"{field}_rows"] == count
    assert re.search(rf"{re.escape(told)}.*: {count}\n", (tmp_path / "out" / CARD_TEXT).read_text())


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_run_can_read_it_whatever_it_was(tmp_path: Path, name: str) -> None:
    card = prepared(tmp_path, [skywork(GOATS, '["19"]', 7), skywork("Double it.", TESTS, 8)], name)
    path = tmp_path / "out" / DATA_FILE
    found = load_prompts(path, load_tokenizer(MODEL), 500, ground_truth_check("math_or_code")).prompts
    assert [prompt.ground_truth for prompt in found] == ["19", TESTS]
    assert [prompt.extra_info["index"] for prompt in found] == [7, 8]
    assert card.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert card.sources == [{"name": name, "sha256": digest, "rows": 2}]


GAMES = [{"question": "Guess my number.", "answer": answer} for answer in ("7", "8")]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([{"text": "a"}] * 2, {"max_invalid": 0.05}, "2 of 2 rows are invalid(.|\n)*its columns are text"),
        ([{"text": "a"}], {}, r"no row of 1 is left \(invalid 1\)"),
        (GAMES, {"difficulty": "hard"}, r"no row of 2 is left \(difficulty 2\)"),
        ([], {}, r"rows\.jsonl: the file has no rows"),
        (GAMES[:1], {"source_column": "task", "max_invalid": 0.0}, "--source-column task is None"),
    ],
)
def test_nothing_is_written_without_rows(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        prepared(tmp_path, rows, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_output_is_kept(tmp_path: Path) -> None:
    prepared(tmp_path, [skywork(GOATS, "19")])
    with pytest.raises(ConfigError, match="overwrite"):
        prepared(tmp_path, [skywork(GOATS, "19")])
    (tmp_path / "out/notes.md").touch()
    with pytest.raises(ConfigError, match=r"holds notes\.md, which was put there by something else"):
        prepared(tmp_path, [skywork(GOATS, "19")], overwrite=True)
    (tmp_path / "out/notes.md").unlink()
    (tmp_path / "out" / CARD_FILE).unlink()
    with pytest.raises(ConfigError, match="not a prepared dataset"):
        prepared(tmp_path, [skywork(GOATS, "19")], overwrite=True)


def test_broken_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(*_: Any, **__: Any) -> None:
        raise OSError("no network here")

    monkeypatch.setattr("datasets.load_dataset", no_hub)
    for source in ("nowhere.jsonl", str(tmp_path), "someone/some-set"):
        with pytest.raises(ConfigError, match="no network here" if "someone" in source else "no such file"):
            prepare(PrepareOptions((source,), tmp_path / "out"))


def test_a_dataset_of_the_hub_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    dataset = datasets.Dataset.from_list([skywork(GOATS, "19")])

    def hub(name: str, config: str | None, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((name, config, split, revision))
        return dataset

    monkeypatch.setattr("datasets.load_dataset", hub)
    options = PrepareOptions(("someone/a-set:part",), tmp_path / "out", split="math", revision="abc")
    card = prepare(options)
    assert asked == [("someone/a-set", "part", "math", "abc")]
    assert card.sources[0]["name"] == "someone/a-set:part, split math"
    assert card.sources[0]["sha256"] == sources.hub_source("", dataset).digest()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ngram_share": 0.0}, "ngram_share=0.0"),
        ({"reward": "mine"}, "reward=mine must be one of math, "),
        ({"min_difficulty": 1.0}, "need difficulty"),
        ({"difficulty": "x", "min_difficulty": 3.0, "max_difficulty": 2.0}, "is above"),
        ({"against": ("nothing",)}, "neither a file nor a suite"),
        ({"question_column": "body"}, "row 0: it has no column body"),
        ({"drop_columns": ("body",)}, "row 0: it has no column body"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepared(tmp_path, [skywork(GOATS, "19")], **options)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "set.jsonl", [skywork(GOATS, "19"), skywork(GOATS, "19")])
    assert run(["data", "prepare", source, "--output", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "1 of 2 rows are in" in told
    assert "left out: 1 duplicate" in told
    assert run(["data", "prepare", source, "--output", str(tmp_path / "out")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(["data", "prepare", source, "--output", str(tmp_path / "out"), "--overwrite"]) == 0
    assert run(["data"]) == 2


def test_columns_and_sources_reach_a_run(tmp_path: Path) -> None:
    """Values of several types in one column are not an obstacle: Arrow refuses them, JSON does not."""
    rows = [
        {"question": f"{n}+1?", "answer": str(n + 1), "task": f"task {n}", "metadata": {"terms": terms}}
        for n, terms in enumerate(([1, "+", 1], [{"a": 2}], "none"))
    ]
    for row in rows[:2]:
        row["metadata"]["kind"] = True
    prepared(tmp_path, rows, source_column="task")
    found = load_prompts(tmp_path / "out" / DATA_FILE, load_tokenizer(MODEL), 400).prompts
    assert [one.data_source for one in found] == ["task 0", "task 1", "task 2"]
    assert [one.extra_info["metadata"] for one in found] == [row["metadata"] for row in rows]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    rows = [skywork(f"What is {n} more than 1?", str(n + 1), n) for n in range(20)]
    names = (DATA_FILE, CARD_FILE, CARD_TEXT)
    prepared(tmp_path, rows, tokenizer=MODEL)
    first = [(tmp_path / "out" / name).read_bytes() for name in names]
    prepared(tmp_path, rows, tokenizer=MODEL, overwrite=True)
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == first
    lengths = json.loads(first[1])["prompt_tokens"]
    assert lengths["smallest"] == lengths["median"] == lengths["largest"] - 1  # 10 to 19 have a digit more
