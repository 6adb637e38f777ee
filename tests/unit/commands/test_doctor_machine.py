"""``bapo doctor``: rows of the machine (limits, memory, disk, isolation) and of SGLang's environment."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.commands.doctor import machine, sglang
from bapo_megatron.commands.doctor.machine import (
    disk_rows,
    forgeable_row,
    has_infiniband,
    isolation_row,
    locked_memory_row,
    sandbox_rows,
    shared_memory_row,
)
from bapo_megatron.commands.doctor.packages import SGLANG, SGLANG_CUDA, TRAINING, pins
from bapo_megatron.reward.sandbox.sandbox import SandboxError


def interpreter(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def answering(folder: Path, versions: dict[str, Any]) -> Path:
    return interpreter(folder, f"echo '{json.dumps(versions)}'")


def test_sglang_is_asked_for_its_versions(tmp_path: Path) -> None:
    told = {"python": "3.11.7", "sglang": "0.5.20", "torch": "2.13.0+cu130", "sglang-router": None}
    rows = list(sglang.sglang_rows(True, answering(tmp_path, told)))
    assert [row.name for row in rows] == ["interpreter", "sglang", "torch", "sglang-router"]
    assert [row.state for row in rows] == ["ok", "optional", "ok", "optional"]
    assert rows[1].found == "0.5.20, which was not tested"
    assert rows[1].needed == f"tested: {pins(SGLANG)['sglang']}"
    # One that is half installed by make cluster is known by its folder.
    folder = tmp_path / ".venv-cluster-sglang/bin"
    folder.mkdir(parents=True)
    half = {"python": "3.11.7", "sglang": None, "torch": pins(SGLANG_CUDA)["torch"]}
    rows = list(sglang.sglang_rows(True, answering(folder, half)))
    assert [row.state for row in rows] == ["ok", "problem", "ok", "optional"]
    assert rows[1].fix == "make cluster installs the tested versions"


def test_an_environment_of_make_cluster_is_held_against_its_own_pins(tmp_path: Path) -> None:
    """With CUDA's kernels in it. On a login node `make sglang` would lay CPU builds over it."""
    told = {**pins(SGLANG_CUDA), "python": "3.11.7"}
    rows = list(sglang.sglang_rows(True, answering(tmp_path, told)))
    assert [row.state for row in rows] == ["ok"] * 4
    assert rows[2].found == pins(SGLANG_CUDA)["torch"] != pins(TRAINING)["torch"]
    told["torch"] = pins(TRAINING)["torch"]
    rows = list(sglang.sglang_rows(True, answering(tmp_path, told)))
    assert (rows[2].state, rows[2].needed) == ("optional", f"tested: {pins(SGLANG_CUDA)['torch']}")
    assert rows[2].fix == "make cluster installs the tested versions"


@pytest.mark.parametrize("required", [True, False])
def test_no_sglang_is_a_problem_where_the_run_starts_servers(tmp_path: Path, required: bool) -> None:
    (row,) = sglang.sglang_rows(required, tmp_path / "nowhere")
    assert row.state == ("problem" if required else "optional")
    assert f"no interpreter at {tmp_path / 'nowhere'}" in row.found
    empty = {"python": "3.11.7", "sglang": None, "torch": None, "sglang-router": None}
    rows = list(sglang.sglang_rows(required, answering(tmp_path, empty)))
    assert [each.state for each in rows] == ["ok", row.state, row.state, "optional"]


def test_an_interpreter_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "DEADLINE_S", 1.0)
    for body, says in (
        ("echo broken >&2; exit 4", "exit code 4: broken"),
        ("echo hello", "no answer"),
        ("sleep 60", "no end within 1 s"),
    ):
        (row,) = sglang.sglang_rows(True, interpreter(tmp_path, body))
        assert row.state == "problem"
        assert says in row.found


def test_locked_memory_matters_with_infiniband(tmp_path: Path) -> None:
    assert locked_memory_row(resource.RLIM_INFINITY, True).state == "ok"
    assert locked_memory_row(8 << 20, False).found == "8192 KiB; no InfiniBand here"
    assert locked_memory_row(8 << 20, True).state == "optional"
    assert not has_infiniband(tmp_path / "none")
    (tmp_path / "mlx5_0").mkdir()
    assert has_infiniband(tmp_path)


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


def test_missing_isolation_fails_a_recipe_that_needs_it() -> None:
    assert isolation_row(list, True).state == "ok"
    row = isolation_row(lambda: ["no namespaces"], True)
    assert (row.state, row.found) == ("problem", "no namespaces")
    assert "docker" in row.fix.lower()
    assert isolation_row(lambda: ["no namespaces"], False).state == "optional"

    def broken() -> list[str]:
        raise SandboxError("it does not work")

    assert isolation_row(broken, True).found == "it does not work"
    assert forgeable_row(0).state == "ok"
    assert forgeable_row(3).found.endswith("forge: 3")
    states = {row.name: row.state for row in sandbox_rows(True, allow_weak=True, forgeable_rows=1)}
    assert set(states) == {"walls", "tests"}
    assert "problem" not in states.values()
