"""A run directory: its names in every version, who may write to it, and files that never end or are gone."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.commands.cluster.status import read_status, rows_from_end, status_text
from bapo_megatron.errors import printable
from bapo_megatron.runtime import files, jsonl_log
from bapo_megatron.runtime.files import others_may_write
from bapo_megatron.runtime.jsonl_log import JsonlLog, read_jsonl
from bapo_megatron.runtime.run_paths import (
    JOB_END,
    MANIFEST,
    Moment,
    RunPaths,
    moment_of,
    step_entries,
    step_leftovers,
    step_name,
)


def test_a_run_directory_that_others_may_write_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.pwd, "getpwuid", lambda _uid: SimpleNamespace(pw_name="ada"))
    for mode, group, found in (
        (0o755, "lab", "None"),
        (0o775, "ada", "None"),  # a group of the user's own name
        (0o2770, "lab", f"may be written by its group {os.getegid()} (mode 2770)"),
        (0o1777, "ada", "may be written by everybody (mode 1777)"),
    ):
        monkeypatch.setattr(files.grp, "getgrgid", lambda _gid, name=group: SimpleNamespace(gr_name=name))
        tmp_path.chmod(mode)
        assert found in str(others_may_write(tmp_path))
    for owner, found in ((8, "belongs to user 8"), (0, "None")):  # root may write anywhere
        status = SimpleNamespace(st_uid=owner, st_gid=70, st_mode=0o40755)
        folder: Any = SimpleNamespace(stat=lambda status=status: status)
        assert found in str(others_may_write(folder))


def test_the_torn_end_is_found_from_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_log, "_BLOCK", 4)
    for content, whole in ((b'{"a": 1}\n{"b', b'{"a": 1}\n'), (b"torn", b""), (b"", b""), (b"{}\n", b"{}\n")):
        path = tmp_path / "log.jsonl"
        path.write_bytes(content)
        JsonlLog(path).close()
        assert path.read_bytes() == whole


def test_damaged_characters_do_not_end_a_reader(tmp_path: Path) -> None:
    """A character that was cut within its bytes."""
    log = tmp_path / "events.jsonl"
    log.write_bytes(b'{"kind": ["\\uD83D\\ude00"]}\n{"kind": "\xc3"}\n')
    first, second = read_jsonl(log)
    assert first == {"kind": ["\U0001f600"]}
    assert second == {"kind": "\ufffd"}
    assert list(rows_from_end(log)) == [second, first]


def test_terminal_codes_are_printed_as_text(tmp_path: Path) -> None:
    event = {
        "time": "2026-01-01T00:00:00+00:00",
        "kind": "job_stopped",
        "cause": "\x1b]0;title\x07\u202e\x9b2J",
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    text = status_text(read_status(tmp_path))
    assert r"\x1b]0;title\x07\u202e\x9b2J" in text
    assert printable("é 字 \t\n") == "é 字 \t\n"
    assert printable("\ud800\r") == r"\ud800\r"


ROOT = Path(__file__).parents[3]
RUN = RunPaths(Path("run"))


@pytest.mark.parametrize("moment", [(0, 0), (10, 0), (10, 3), (999999, 999), (1000000, 1000)])
def test_a_step_name_round_trips_to_its_moment(moment: Moment) -> None:
    assert moment_of(step_name(*moment)) == moment


def test_entries_and_leftovers_of_a_folder(tmp_path: Path) -> None:
    leftovers = [".step_000004.a.tmp", ".step_000004_update_002.deleted"]
    steps = ["step_000002.npz", "step_000010.npz", "step_000003.lost"]
    for name in (*steps, *leftovers, "step_x.npz", ".step_000004.mine", ".step_mine.tmp"):
        (tmp_path / name).touch()
    assert sorted(moment for moment, _ in step_entries(tmp_path, ".npz")) == [(2, 0), (10, 0)]
    assert [path.name for _, path in step_entries(tmp_path, ".lost")] == ["step_000003.lost"]
    assert sorted(path.name for path in step_leftovers(tmp_path)) == leftovers
    assert list(step_leftovers(tmp_path / "absent")) == list(step_entries(tmp_path / "absent")) == []


def test_the_shell_has_the_same_names() -> None:
    script = f". {ROOT}/slurm/lib/run_paths.sh; (set -o posix; set)"
    lines = subprocess.check_output(["bash", "-c", script], text=True, env={}).splitlines()
    shell = {line.partition("=")[0]: line.partition("=")[2].strip("'") for line in lines}
    assert (RUN.lock.name, RUN.slurm_state.name, RUN.api_key.name) == (".lock", "slurm.state", "api_key")
    assert (RUN.engines.name, RUN.stop.name) == ("engines", "stop")  # as runs of earlier versions have them
    mirror = {
        "BAPO_EVENTS_FILE": RUN.events.name,
        "BAPO_STATE_FILE": RUN.slurm_state.name,
        "BAPO_STOP_FILE": RUN.stop.name,
        "BAPO_API_KEY_FILE": RUN.api_key.name,
        "BAPO_LOGS_FOLDER": RUN.logs.name,
        "BAPO_ENGINES_FOLDER": RUN.engines.name,
        "BAPO_CHECKPOINTS_FOLDER": RUN.checkpoints.name,
        "BAPO_JOB_END_FILE": JOB_END,
        "BAPO_MANIFEST_FILE": MANIFEST,
    }
    pattern = shell["BAPO_STEP_PATTERN"]
    assert {name: value for name, value in shell.items() if name.startswith("BAPO_")} == {
        **mirror,
        "BAPO_STEP_PATTERN": pattern,
    }
    whole = (step_name(10), step_name(10, 3), step_name(10**7, 10**4))
    for name in (*whole, "step_00010", "step_000010_update_1"):
        match = re.search(pattern, name)
        assert (match and (int(match[1]), int(match[3] or 0))) == moment_of(name)
