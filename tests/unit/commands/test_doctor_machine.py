"""``bapo doctor``: rows of the machine (memory, disk, isolation) and of SGLang's environment."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bapo_megatron.commands.doctor import machine, sglang
from bapo_megatron.commands.doctor.machine import disk_rows, sandbox_rows, shared_memory_row
from bapo_megatron.commands.doctor.packages import SGLANG, SGLANG_CUDA, TRAINING, pins
from bapo_megatron.reward.sandbox.sandbox import SandboxError
from tests.support.executables import executable


def answering(folder: Path, versions: dict[str, Any]) -> Path:
    return executable(folder / "python", f"echo '{json.dumps(versions)}'")


TRAINED, CUDA = pins(TRAINING)["torch"], pins(SGLANG_CUDA)["torch"]
KERNELS = {"sglang-kernel": "1"}
"""Packages by which an environment of `make cluster` is known; one that is half installed by its folder."""


@pytest.mark.parametrize(
    ("folder", "told", "states", "fix"),
    [
        ("bin", {"sglang": "0.5.20", "torch": f"{TRAINED}+cu130"}, ["optional", "ok", "optional"], "make "),
        # On a login node `make sglang` would lay CPU builds over it.
        ("bin", {**pins(SGLANG_CUDA), **KERNELS}, ["ok"] * 3, ""),
        (
            "bin",
            {**pins(SGLANG_CUDA), **KERNELS, "sglang": "0.5.20"},
            ["optional", "ok", "ok"],
            "make cl",
        ),
        (".venv-cluster-sglang/bin", {"torch": CUDA}, ["problem", "ok", "optional"], "make cl"),
    ],
)
def test_an_environment_is_held_against_its_own_pins(
    tmp_path: Path, folder: str, told: dict[str, str], states: list[str], fix: str
) -> None:
    assert CUDA != TRAINED
    (tmp_path / folder).mkdir(parents=True)
    named = {**dict.fromkeys(("sglang", "torch", "sglang-router")), **told, "python": "3.11.7"}
    first, *rows = sglang.sglang_rows(True, answering(tmp_path / folder, named))
    assert first.state == "ok"
    assert [row.name for row in rows] == ["sglang", "torch", "sglang-router"]
    assert [row.state for row in rows] == states
    assert rows[0].needed == f"tested: {pins(SGLANG)['sglang']}"
    assert rows[0].fix.startswith(fix)


@pytest.mark.parametrize("required", [True, False])
def test_no_sglang_is_a_problem_where_the_run_starts_servers(tmp_path: Path, required: bool) -> None:
    (row,) = sglang.sglang_rows(required, tmp_path / "nowhere")
    assert row.state == ("problem" if required else "optional")
    assert f"no interpreter at {tmp_path / 'nowhere'}" in row.found
    empty = {"python": "3.11.7", "sglang": None, "torch": None, "sglang-router": None}
    rows = list(sglang.sglang_rows(required, answering(tmp_path, empty)))
    assert [each.state for each in rows] == ["ok", row.state, row.state, "optional"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("echo broken >&2; exit 4", "exit code 4"),
        ("echo hello", "no answer"),
        ("sleep 60", "no end wi"),
    ],
)
def test_an_interpreter_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    monkeypatch.setattr(sglang, "DEADLINE_S", 1.0)
    (row,) = sglang.sglang_rows(True, executable(tmp_path / "python", body))
    assert (row.state, says in row.found) == ("problem", True)


Usage = namedtuple("Usage", "total used free")


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((64 << 20, "optional"), (1 << 30, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: Usage(2 * free, free, free))
        row = shared_memory_row(tmp_path)
        assert row.state == state
    assert row.found == "2.1 GB, 1.1 GB free"


def test_the_disk_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(0, 0, 50_000_000_000))
    directory = tmp_path / "not/there/yet"
    for needed in (0.0, 49.0):
        assert [row.state for row in disk_rows(directory, needed)] == ["ok"]
    (short,) = disk_rows(directory, 51.0)
    assert (short.state, short.found) == ("problem", "50.0 GB free")
    assert short.needed == "51.0 GB, for checkpoints, weights and rollouts"
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_args: False)
        assert [row.state for row in disk_rows(directory)] == ["ok", "problem"]
    assert not directory.exists()
    (directory / "journal").mkdir(parents=True)
    (directory / "journal/step_000001.npz").touch()
    os.truncate(directory / "journal/step_000001.npz", 2_000_000_000)  # what the run has written is not free
    (enough,) = disk_rows(directory, 51.0)
    assert (enough.state, enough.found) == ("ok", "50.0 GB free, and 2.0 GB of this run there")
    assert [row.state for row in disk_rows(directory, 53.0)] == ["problem"]
    monkeypatch.setattr(machine, "DISK_DEADLINE_S", 0.1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: time.sleep(30))
    (row,) = disk_rows(tmp_path)
    assert (row.state, row.found) == ("problem", "no answer within 0.1 s")


def test_missing_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that needs it has a problem of its own, from `train`'s check."""
    for notes, state, found in (
        (list, "ok", "all stand"),
        (lambda: ["no namespaces"], "optional", "no namespaces"),
        (Mock(side_effect=SandboxError("it does not work")), "optional", "it does not work"),
    ):
        monkeypatch.setattr("bapo_megatron.reward.sandbox.sandbox.sandbox_notes", notes)
        [row] = sandbox_rows()
        assert (row.state, row.found, "docker" in row.fix.lower()) == (state, found, state != "ok")
