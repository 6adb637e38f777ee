"""The user's command for each export: when it runs, when it runs again, and that it is never the run's
failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.exports import AfterExport
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.waiting import is_alive, until


class Owner:
    """A run whose exports are made by hand, with the events that were recorded."""

    def __init__(self, run: Path, command: str, last_step: int = 9, minutes: float = 60.0) -> None:
        self.run = run
        self.events: list[dict[str, Any]] = []
        self.after = AfterExport(RunPaths(run), "my-run", last_step, command, minutes, self.events.append)

    def export(self, step: int) -> None:
        folder(self.run / f"exports/step_{step:06d}")
        self.after.exported(step)

    def wait(self) -> None:
        until(lambda: not self.after.is_busy() or self.after.poll())

    def kinds(self) -> list[tuple[str, int]]:
        return [(event["kind"].removeprefix("after_export_"), event["step"]) for event in self.events]


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "commands.log"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder whose name is no shell code."""
    run = tmp_path / "a b; touch hacked"
    run.mkdir()
    return run


def noting(log: Path) -> str:
    return f"""sh -c 'echo "$0 $1 $2" >> {log}' {{folder}} {{step}} {{name}}/x"""


def test_the_command_runs_for_each_export_one_at_a_time(run: Path, log: Path) -> None:
    owner = Owner(run, noting(log))
    for step in (2, 4):
        owner.export(step)
    owner.wait()
    assert log.read_text().splitlines() == [f"{run}/exports/step_00000{s} {s} my-run/x" for s in (2, 4)]
    assert owner.kinds() == [("started", 2), ("done", 2), ("started", 4), ("done", 4)]
    about = {"export": "step_000002", "step": 2}
    done = {"kind": "after_export_done", **about, "seconds": owner.events[1]["seconds"]}
    assert owner.events[:2] == [{"kind": "after_export_started", **about}, done]
    assert json.loads((run / "after_export.json").read_text()) == {"done": ["step_000002", "step_000004"]}


def test_a_hook_that_succeeded_is_not_repeated_and_a_failed_one_is(run: Path, log: Path) -> None:
    owner = Owner(run, "sh -c 'test $0 != 4 || { echo no network; exit 5; }' {step} {folder}")
    for step in (2, 4, 6):
        owner.export(step)
    owner.wait()
    assert owner.kinds()[2:4] == [("started", 4), ("failed", 4)]
    assert owner.events[3]["reason"] == "exit code 5: no network"
    assert (run / "logs/after_export/step_000004.log").read_text() == "no network\n"
    (run / "exports/step_000005").mkdir()  # no export: it has no config.json
    again = Owner(run, noting(log))
    again.after.resume()
    again.wait()
    assert again.kinds() == [("started", 4), ("done", 4)]
    assert log.read_text().startswith(f"{run}/exports/step_000004 4 ")


def test_a_step_that_is_exported_again_runs_its_hook_again(run: Path, log: Path) -> None:
    owner = Owner(run, noting(log))
    owner.export(2)
    owner.wait()
    owner.after.exported(2)
    owner.after.close()  # a stop: what was there is another export
    again = Owner(run, noting(log))
    again.after.resume()
    again.wait()
    assert again.kinds() == [("started", 2), ("done", 2)]


def test_the_last_step_runs_its_hook_once_on_the_final_export(run: Path, log: Path) -> None:
    folder(run / "export")
    owner = Owner(run, noting(log), last_step=4)
    owner.export(4)
    assert not owner.after.is_busy()
    owner.after.exported_last(is_new=True)
    owner.wait()
    assert log.read_text().splitlines() == [f"{run}/export 4 my-run/x"]
    for is_new, runs in ((False, 1), (True, 2)):
        again = Owner(run, noting(log), last_step=4)
        again.after.resume()
        again.after.exported_last(is_new)
        again.wait()
        assert len(log.read_text().splitlines()) == runs
    longer = Owner(run, noting(log), last_step=8)  # more --steps: what was the last is an export like others
    longer.after.resume()
    assert not longer.after.is_busy()


def test_a_command_beyond_its_limit_is_ended_with_what_it_started(run: Path, log: Path) -> None:
    command = f"bash -c 'sleep 1000 & echo $! > {log}; echo slow; wait' {{folder}}"
    owner = Owner(run, command, minutes=0.02)
    owner.export(2)
    owner.wait()
    assert owner.kinds() == [("started", 2), ("failed", 2)]
    assert owner.events[-1]["reason"] in ("no end within 0.02 min: slow", "no end within 0.02 min")
    assert not log.exists() or not is_alive(int(log.read_text() or 0))


def test_a_command_that_cannot_be_started_is_an_event_and_the_next_one_runs(run: Path, log: Path) -> None:
    owner = Owner(run, f"{log.parent}/upload {{folder}}")
    for step in (2, 4):
        owner.export(step)
    owner.wait()
    assert owner.kinds() == [("failed", 2), ("failed", 4)]
    assert "it cannot be started" in owner.events[0]["reason"]


def test_the_end_of_the_run_ends_the_command_and_the_next_start_runs_it_again(run: Path, log: Path) -> None:
    owner = Owner(run, f"bash -c 'echo $$ > {log}; sleep 1000' {{folder}}")
    for step in (2, 4):
        owner.export(step)
    until(lambda: log.exists() and log.read_text())
    owner.after.close()
    assert not is_alive(int(log.read_text()))
    assert owner.kinds() == [("started", 2)]
    again = Owner(run, "true {folder}")
    again.after.resume()
    again.wait()
    assert again.kinds() == [("started", 2), ("done", 2), ("started", 4), ("done", 4)]
