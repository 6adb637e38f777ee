"""The user's command for each export, by that of the final one: when it runs, when it runs again, and that it
is never the run's failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.exports import AfterExport, StepExports
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.processes import keep_priority
from tests.support.waiting import is_alive, until


@pytest.fixture(autouse=True)
def _kept_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_priority(monkeypatch)


class Owner:
    """A run whose final export is made by hand, with the events that were recorded."""

    def __init__(self, run: Path, command: str, minutes: float = 60.0) -> None:
        self.events: list[dict[str, Any]] = []
        after = AfterExport(command, minutes, "my-run", last_step=9)
        self.exports = StepExports(RunPaths(run), run, 2, self.events.append, after)

    def finish(self, is_new: bool = False) -> list[str]:
        """The kinds of events of the command, once it has ended."""
        self.events.clear()
        self.exports.finish(is_new)
        until(lambda: not self.exports.is_busy() or self.exports.poll())
        return [event["kind"].removeprefix("export_") for event in self.events]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "commands.log"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder whose name is no shell code."""
    run = tmp_path / "a b; touch hacked"
    (run / "export").mkdir(parents=True)
    return run


def test_the_command_is_told_of_the_export_and_runs_once(run: Path, log: Path) -> None:
    script = (
        f"""echo "$0 $1 $2" >> {log}; echo "$BAPO_RUN_DIR $BAPO_EXPORT $BAPO_EXPORT_STEP" >> {log}; env"""
    )
    owner = Owner(run, f"sh -c '{script}' {{folder}} {{step}} {{name}}/x")
    assert owner.finish() == ["started", "done"]
    assert log.read_text().splitlines() == [f"{run}/export 9 my-run/x", f"{run} {run}/export 9"]
    done = owner.events[-1]
    assert done == {**done, "kind": "export_done", "step": 9, "path": f"{run}/export"}
    assert "BAPO_EXPORT=" in (run / "logs/after_export/step_000009.log").read_text()
    assert json.loads((run / "after_export.json").read_text()) == {"done": ["step_000009"]}
    for is_new, kinds in ((False, []), (True, ["started", "done"])):
        assert Owner(run, "true").finish(is_new) == kinds


def test_a_command_that_failed_is_an_event_and_runs_again(
    run: Path, log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    owner = Owner(run, "sh -c 'echo no network; exit 5'")
    for command, told in (
        ("sh -c 'echo no network; exit 5'", "exit code 5: no network"),
        (f"{log.parent}/upload {{folder}}", "No such file"),
    ):
        owner = Owner(run, command)
        assert owner.finish(is_new=True) == ["started", "failed"]
        assert told in owner.events[-1]["message"]
        assert "warning: the export of step 9 has failed: " in capfd.readouterr().err
    assert Owner(run, "true").finish() == ["started", "done"]
    assert owner.finish(is_new=True) == ["started", "failed"]  # another export than that which was sent
    assert Owner(run, "true").finish() == ["started", "done"]


def test_a_command_beyond_its_limit_is_ended_with_what_it_started(run: Path, log: Path) -> None:
    owner = Owner(run, f"bash -c 'sleep 1000 & echo $! > {log}; echo slow; wait' {{folder}}", minutes=0.02)
    assert owner.finish() == ["started", "failed"]
    assert "checkpoint.after_export: no end within 0.02 min" in owner.events[-1]["message"]
    assert not log.exists() or not is_alive(int(log.read_text() or 0))


def test_the_end_of_the_run_ends_the_command_and_the_next_start_runs_it_again(run: Path, log: Path) -> None:
    owner = Owner(run, f"bash -c 'echo $$ > {log}; sleep 1000' {{folder}}")
    owner.exports.finish(is_new=True)
    until(lambda: log.exists() and log.read_text())
    owner.exports.close()
    assert not is_alive(int(log.read_text()))
    assert Owner(run, "true").finish() == ["started", "done"]
