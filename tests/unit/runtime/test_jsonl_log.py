"""Logs survive a kill at any byte, are strict JSON, and can be taken back to a step."""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.jsonl_log import JsonlLog, finite_json, read_events, read_jsonl

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
rows = st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def write_steps(path: Path, *steps: int) -> None:
    with closing(JsonlLog(path)) as log:
        for step in steps:
            log.append({"step": step})


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(path)]


@given(written=rows)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, written: list[dict]) -> None:
    path = tmp_path_factory.mktemp("logs") / "log.jsonl"
    with closing(JsonlLog(path)) as log:
        for row in written:
            log.append(row)
    assert read_jsonl(path) == [finite_json(row) for row in written]
    assert path.read_bytes().count(b"\n") == len(written)


@given(cut=st.integers(min_value=0, max_value=45))
def test_a_kill_at_any_byte_costs_the_last_line_at_most(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("logs") / "log.jsonl"
    write_steps(path, 1, 2, 3)
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert steps_in(path) == [1, 2, 3][:whole]
    write_steps(path, 9)
    assert steps_in(path) == [*[1, 2, 3][:whole], 9]


def test_infinities_and_nan_are_null(path: Path) -> None:
    with closing(JsonlLog(path)) as log:
        log.append({"step": 1, "a": math.inf, "b": [math.nan, {"c": -math.inf}], "d": 0.5})
        # Before the log is closed: a kill costs nothing.
        assert path.read_text() == '{"step": 1, "a": null, "b": [null, {"c": null}], "d": 0.5}\n'


def test_rewind_keeps_the_steps_up_to_the_given_one(path: Path) -> None:
    write_steps(path, 1, 2, 2, 3, 4)
    kept = path.read_bytes().split(b"\n")[:3]
    with closing(JsonlLog(path)) as log:
        log.rewind(4)
        log.rewind(2)
        assert path.read_bytes().split(b"\n")[:-1] == kept
        log.append({"step": 3})
    assert steps_in(path) == [1, 2, 2, 3]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("bad", ["{torn", "[1]"])
def test_a_bad_line_in_the_middle_is_told_with_its_number(path: Path, bad: str) -> None:
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
    with pytest.raises(ConfigError, match=r"log\.jsonl, line 2 is not"):
        read_jsonl(path)


def test_damaged_lines_of_the_event_log_are_left_out(path: Path) -> None:
    """Two nodes append to it, and NFS writes the shorter line over the beginning of the longer one."""
    path.write_bytes(
        b'{"kind": "start"}\n{"kind": "saving"}\nstep": 4, "stall_s": 1.2}\n\0\0\0\n{"kind": "done"}\n{"t'
    )
    assert [row["kind"] for row in read_events(path)] == ["start", "saving", "done"]
    assert read_events(path.with_name("none")) == []


def test_an_atomic_write_is_whole_or_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps("old"))

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == '"old"'
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_atomically(path, "käse")
    assert path.read_bytes() == "käse".encode()
