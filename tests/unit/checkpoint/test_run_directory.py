"""The directory of a run: its stored settings, which of them may change, and its only writer."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.algo.bapo import balanced, paper
from bapo_megatron.checkpoint.run_directory import (
    changed_settings,
    check_partial_step,
    check_same_run,
    check_writable,
    only_writer,
    read_config,
    store_config,
    with_former_defaults,
)
from bapo_megatron.config import RunConfig, SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.storage import FailingDiskError
from tests.support.altered import altered
from tests.unit.config.test_config import GOOD


@pytest.fixture
def begun(tmp_path: Path) -> RunConfig:
    run = dataclasses.replace(GOOD, run_dir=tmp_path)
    store_config(run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"name": "another", "steps": 500, "parallel.tensor": 2}, None),
        ({"algorithm.gap_mean_limit": None, "algorithm.on_gap": "stop"}, None),
        ({"optimizer.decay": "cosine", "steps": 500}, "steps: 100 in the run, 500 now"),
        ({"optimizer.lr": 0.1}, "optimizer.lr: 2e-06 in the run, 0.1 now"),
        ({"optimizer.device": "cpu"}, None),
        ({"reward.workers": 7, "reward.time_limit_s": 99.0, "reward.allow_weak_sandbox": True}, None),
        ({"reward.memory_limit_mb": 9999}, None),
        ({"reward.code_case_limit_s": 9.0}, "reward.code_case_limit_s"),  # what a right program is
        ({"reward.function": "code"}, "reward.function"),
        ({"rollout.max_batch": 7, "rollout.segment_tokens": 512, "rollout.keep_steps": None}, None),
        ({"rollout.max_staleness": 3}, "rollout.max_staleness"),
        ({"rollout.max_batch": 7, "rollout.budget_tokens": 8}, "rollout.budget_tokens"),
        ({"rollout.sglang": SglangConfig(urls=("http://x:1",), tensor=4, sync="broadcast")}, None),
        ({"rollout.sglang.on_update": "in_place"}, "rollout.sglang.on_update"),
        ({"data.path": Path("elsewhere")}, "data.path"),
        ({"algorithm.loss": "mine:Loss"}, "algorithm.loss: 'clip' in the run, 'mine:Loss' now"),
    ],
)
def test_how_a_run_is_operated_may_change(
    changes: dict[str, Any], refused: str | None, begun: RunConfig
) -> None:
    """Servers have other addresses after each start of a job; judges get more time on slow machines."""
    changed = altered(begun, changes)
    if refused is None:
        check_same_run(changed)
        return
    with pytest.raises(ConfigError, match=refused) as told:
        check_same_run(changed)
    assert str(told.value).count(" in the run, ") == 1 + ("decay" in str(changes))


def test_a_run_without_a_step_may_have_any_settings(tmp_path: Path) -> None:
    run = dataclasses.replace(GOOD, run_dir=tmp_path)
    check_same_run(run)
    store_config(run)
    check_same_run(altered(run, {"optimizer.lr": 0.1}))


@pytest.mark.parametrize(("name", "least"), [("step_000006", 6), ("step_000006_update_002", 7)])
def test_a_run_does_not_end_at_a_step_that_it_has_passed(tmp_path: Path, name: str, least: int) -> None:
    """Its newest weights would be exported as those of the earlier step."""
    (checkpoint := tmp_path / "checkpoints" / name).mkdir(parents=True)
    run = dataclasses.replace(GOOD, run_dir=tmp_path)
    check_same_run(dataclasses.replace(run, steps=4))  # a half-deleted one is not a checkpoint
    (checkpoint / "manifest.json").write_text("{}")
    check_same_run(dataclasses.replace(run, steps=least))
    with pytest.raises(
        ConfigError, match=rf"steps={least - 1}, but .* has trained 6 .* give --steps {least} "
    ):
        check_same_run(dataclasses.replace(run, steps=least - 1))


def test_a_run_directory_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": 99, "config": {}}')
    with pytest.raises(ConfigError, match="run format 99"):
        check_same_run(dataclasses.replace(GOOD, run_dir=tmp_path))


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (errno.ENOSYS, ConfigError, "cannot be locked .*Lustre: -o flock"),
        (errno.ENOLCK, FailingDiskError, "No locks available"),
    ],
)
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], told: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(kind, match=told), only_writer(tmp_path):
        pass


def test_a_requeued_job_waits_for_the_lock_of_its_last_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server keeps the lock of a node that died; exit code 2 would stop the job for good."""
    monkeypatch.setenv("BAPO_RESTART", "3")
    before = only_writer(tmp_path)
    before.__enter__()
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", lambda s: waits.append(s) or before.__exit__(None, None, None))
    with only_writer(tmp_path):
        assert waits == [1.0]


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(tmp_path / "file")


@pytest.mark.parametrize(
    ("field", "mark", "former", "now", "lines"),
    [
        ("optimizer.fused", "default_fused", False, True, []),
        (
            "reward.on_failure",
            "default_on_failure",
            "value",
            "leave_out",
            ["reward.failed=-0.5, and continues"],
        ),
    ],
)
def test_a_run_of_before_goes_on_with_its_default(
    field: str, mark: str, former: Any, now: Any, lines: list[str], begun: RunConfig
) -> None:
    """Its settings lack the field; also when its continuation is stored. ``--allow-change`` changes over.
    A run of today has the former value only if it says so."""
    old = altered(begun, {"reward.failed": -0.5})
    store_config(altered(old, {field: former}))
    assert with_former_defaults(old) == (old, [])
    with pytest.raises(ConfigError, match=f"{field}: {former!r} in the run, {now!r} now"):
        check_same_run(old)
    store_config(old)
    path = begun.directory / "config.json"
    stored = json.loads(path.read_text())
    del stored[mark]
    assert stored["config"].pop(field) == now
    path.write_text(json.dumps(stored))
    for _ in range(2):
        kept, told = with_former_defaults(old)
        assert kept == altered(old, {field: former})
        assert [part in line for part, line in zip(lines, told, strict=True)] == [True] * len(lines)
        check_same_run(kept)
        store_config(kept)
        begun.paths.metrics.unlink(missing_ok=True)  # the second time within its first step
        (begun.paths.checkpoints / "step_000000_update_001").mkdir(parents=True, exist_ok=True)
    changed = dataclasses.replace(old, allow_change=(field,))
    assert with_former_defaults(changed) == (changed, [])
    store_config(changed)
    assert with_former_defaults(old) == (old, [])


def test_a_run_that_began_with_balanced_goes_on_with_it(begun: RunConfig) -> None:
    """Also where a program with the preset ``paper`` has continued it, which leaves it without the mark."""
    now = dataclasses.replace(begun, algorithm=dataclasses.replace(begun.algorithm, bounds=paper(1024)))
    store_config(altered(now, {"algorithm.bounds": balanced()}))
    path = begun.directory / "config.json"
    stored = json.loads(path.read_text())
    assert stored.pop("default_preset") == "paper"
    path.write_text(json.dumps(stored))
    for _ in range(2):
        kept, [line] = with_former_defaults(now)
        assert kept.algorithm.bounds == balanced()
        assert "began with one search of the bounds an update (preset balanced), and continues so" in line
        check_same_run(kept)
        store_config(kept)
    names = ("algorithm.bounds.scope", "algorithm.bounds.bounds_tokens")
    changed = dataclasses.replace(now, allow_change=names)
    assert with_former_defaults(changed) == (changed, [])


def test_a_step_ends_as_it_began(begun: RunConfig) -> None:
    """Behind a checkpoint within a step, what its updates compute cannot be changed even by name."""
    changes = {"algorithm.reuse_epochs": 7, "optimizer.lr": 0.1, "rollout.temperature": 0.5, "seed": 7}
    harmless = {"algorithm.route_mismatch_limit": 0.5, "steps": 500, "data.path": Path("moved")}
    changed = altered(begun, {**changes, **harmless, "allow_change": (*changes, *harmless)})
    with pytest.raises(ConfigError, match=f"^{', '.join(changes)}: .* lies within a step"):
        check_partial_step(changed_settings(changed, read_config(begun.directory)), changed)
    slower = altered(begun, harmless)
    check_partial_step(changed_settings(slower, read_config(begun.directory)), slower)
    assert changed_settings(begun, None) == []
