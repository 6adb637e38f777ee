"""The one reader of files of rows: `bapo train` and `bapo data prepare` read the same, or refuse the same."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from bapo_megatron.data.prepare.sources import HubSource, open_source
from bapo_megatron.data.rows import read_rows
from bapo_megatron.errors import ConfigError

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
    "a mark before a list": ("rows.json", MARK + LIST),
    "empty lines": ("rows.jsonl", b"\n \n" + LINES.replace(b"\n", b"\r\n\r\n")),
    "objects over several lines": (
        "rows.jsonl",
        b"\n".join(json.dumps(row, indent=2).encode() for row in ROWS),
    ),
    "objects on one line": ("rows.json", b" ".join(LINES.splitlines())),
    "objects without a space": ("rows.jsonl", b"".join(LINES.splitlines())),
    "gzip": ("rows.jsonl", gzip.compress(LINES)),
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
    "a cut line among others": (
        "rows.jsonl",
        LINES[:-3] + b"\n" + LINES,
        "row 1 (the first is 0): not JSON: Expecting",
    ),
    "several lists": ("rows.json", b"[{}]\n[{}]", "row 1 (the first is 0): it is not an object: [{}]"),
    "half an object over several lines": (
        "rows.json",
        json.dumps(ROWS[0], indent=1).encode()[:-1],
        "not JSON: Expecting ',' delimiter, line 13 of it, column 1; a file of rows",
    ),
    "half a line": ("rows.jsonl", LINES[:-5], "row 1 (the first is 0): not JSON: Expecting"),
    "another encoding": (
        "rows.jsonl",
        LINES.decode().encode("utf-16"),
        "not JSON: 'utf-8' codec can't decode",
    ),
    "an end too early": (
        "rows.jsonl",
        gzip.compress(LINES)[:-9],
        "cannot be read: Compressed file ended before",
    ),
    "another compression": ("rows.jsonl", b"(\xb5/\xfd\x04", "not JSON: 'utf-8' codec can't decode"),
    "no parquet": ("rows.parquet", LINES, "cannot be read as parquet: Parquet magic bytes not found"),
    "another ending": ("rows.parquet.gz", b"", "unknown ending; give one of .jsonl, .json, .parquet"),
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
    assert list(HubSource("", datasets.Dataset(table)).rows()) == OBJECTS


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
