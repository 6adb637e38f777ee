"""Datasets that somebody else made: no code of them runs, and odd rows end in one message."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bapo_megatron.data.prepare.sources import open_source
from bapo_megatron.data.rows import _BRACKETS, MAX_DEPTH, iterate_rows, read_rows
from bapo_megatron.errors import ConfigError


class Attack:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("name", ["arrow.py_extension_type", "pyarrow.py_extension_type", "evil"])
def test_no_pickled_type_of_a_parquet_file_runs(name: str, tmp_path: Path) -> None:
    """Arrow once unpickled the types that a file names (CVE-2023-47248)."""
    path, proof = tmp_path / "rows.parquet", tmp_path / "PROOF"
    about = {"ARROW:extension:name": name, "ARROW:extension:metadata": pickle.dumps(Attack(proof))}
    schema = pyarrow.schema([pyarrow.field("prompt", pyarrow.string(), metadata=about)])
    pyarrow.parquet.write_table(pyarrow.table([["a"]], schema=schema), path)
    assert list(open_source(str(path), "train", None).rows()) == [{"prompt": "a"}]
    assert read_rows(path) == [{"prompt": "a"}]
    assert not proof.exists()


def test_no_script_of_a_dataset_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is named as a dataset of the hub is, with the script by which it once was loaded."""
    import datasets

    proof = tmp_path / "PROOF"
    folder = tmp_path / "owner/name"
    folder.mkdir(parents=True)
    (folder / "name.py").write_text(f"open({str(proof)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="source owner/name: no such file"):
        open_source("owner/name", "train", None)
    with pytest.raises(RuntimeError, match="scripts are no longer supported"):
        datasets.load_dataset("owner/name")
    with pytest.raises(RuntimeError, match="scripts are no longer supported"):
        datasets.load_dataset(str(folder / "name.py"))
    assert not proof.exists()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
def test_brackets_within_each_other_end_before_arrow(name: str, between: str, tmp_path: Path) -> None:
    """Whole, so that JSON has nothing against them: at 100,000 Arrow dies, at 10,000 it takes a minute."""
    deep = between.join("[" * (MAX_DEPTH + 1)) + between + "]" * (MAX_DEPTH + 1)
    path = tmp_path / name
    path.write_text('{"a": "]]"}\n' * (name == "rows.jsonl") + deep + "\n")
    for read in (read_rows, lambda path: list(open_source(str(path), "train", None).rows())):
        with pytest.raises(ConfigError, match=rf"{name}, (row|line) \d+.*: (more than 100 br|not JSON)"):
            read(path)


def test_brackets_in_texts_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"a": "[" * 200 + '\\"{'}, {"a": "]"}] * 200
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rows(path) == rows


@pytest.mark.parametrize("end", ["", "\n", "\\", "\\\n"])
def test_a_text_without_an_end_is_one_text(end: str, tmp_path: Path) -> None:
    """Read once: a search from each quote in it would take hours in a row of megabytes."""
    text = '"' + r"print(\"[{\") " * 50 + end
    assert [found.span() for found in _BRACKETS.finditer('{"a": ' + text)] == [
        (0, 1),
        (1, 4),
        (6, 6 + len(text)),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "b"}\n{"a": ' + text)
    with pytest.raises(ConfigError, match=r"row 1 .*not JSON"):
        list(iterate_rows(path))


@pytest.mark.parametrize("row", ["[" * 100_000, "\x00", '{"a": 1'])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_that_no_parser_takes_is_one_message(name: str, row: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(row + "\n")
    with pytest.raises(ConfigError, match=r"rows\.json"):
        list(open_source(str(path), "train", None).rows())
    with pytest.raises(ConfigError, match=r"rows\.json"):
        read_rows(path)
