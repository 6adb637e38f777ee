"""An observer gives each row of a run to its tracker once, whatever the tracker does and when either dies."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.runtime.jsonl_log import JsonlLog
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records import following
from bapo_megatron.trainer.records.following import (
    END,
    NEWS,
    Inbox,
    Observer,
    TrackedRow,
    TrackedRows,
    TrackerState,
    read_state,
    write_state,
)
from bapo_megatron.trainer.records.trackers import RedactingStream, TrackedRun, redacted, tracked_run

Written = tuple[int, dict[str, float]]


class Store:
    """A tracker's data, which outlives its clients; and its faults."""

    def __init__(self) -> None:
        self.rows: list[Written] = []
        self.opened: list[TrackedRun] = []
        self.ends: list[str | None] = []
        self.can_tell = True
        self.failures: list[Exception] = []
        """Raised by the next writes, one each; the row is not stored."""

    def client(self, run: TrackedRun) -> Client:
        self.opened.append(run)
        return Client(self)


class Client:
    def __init__(self, store: Store) -> None:
        self._store = store

    def last_step(self, metric: str) -> int | None:
        steps = [step for step, metrics in self._store.rows if metric in metrics]
        return max(steps, default=-1) if self._store.can_tell else None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self._store.failures:
            raise self._store.failures.pop(0)
        self._store.rows.append((step, metrics))

    def close(self, end: str | None) -> None:
        self._store.ends.append(end)


class FilesOfRun:
    """A run directory that a test writes as a run does."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.paths.trackers.mkdir()
        self.paths.wandb_id.write_text("0123abcd")
        config = {"name": "demo", "logging.project": "sums", "seed": 3, "evaluation.suites": []}
        self.paths.config.write_text(json.dumps({"format": 2, "config": config}))
        self.steps, self.evaluations = JsonlLog(self.paths.metrics), JsonlLog(self.paths.evaluations)
        self.state = self.paths.tracker_state("fake")

    def step(self, step: int, **more: Any) -> None:
        self.steps.append({"step": step, "reward/mean": step / 10, "time/step_s": 1.0, **more})

    def evaluation(self, step: int) -> None:
        self.evaluations.append({"step": step, "eval/mean": step / 100})


@pytest.fixture
def run(tmp_path: Path) -> FilesOfRun:
    return FilesOfRun(tmp_path)


def row(step: int, **more: float) -> Written:
    return step, {"reward/mean": step / 10, "time/step_s": 1.0, **more}


def evaluation(step: int) -> Written:
    return step, {"eval/mean": step / 100}


def observe(run: FilesOfRun, store: Store, resume_step: int = 0) -> bool:
    """Follow what is in the files, as a run's last rows."""
    reading, writing = os.pipe()
    os.write(writing, NEWS + END)
    inbox = Inbox(reading)
    inbox.wait()
    try:
        return Observer(run.paths.root, "fake", resume_step, store.client, inbox).observe()
    finally:
        os.close(reading)
        os.close(writing)


def test_a_pipe_that_closes_is_the_end_of_the_run() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    inbox = Inbox(reading)
    inbox.wait(limit_s=60.0)
    os.close(reading)
    assert inbox.is_ending


def test_the_tracker_gets_each_row_in_order(run: FilesOfRun) -> None:
    store = Store()
    for step in (0, 2):
        run.evaluation(step)
    for step in (1, 2, 3):
        run.step(step, none=None, word="x", flag=True)
    assert observe(run, store)
    assert store.rows == [evaluation(0), row(1), row(2), evaluation(2), row(3)]
    assert len(store.ends) == 1
    assert read_state(run.state) == TrackerState(step=3, evaluation=2, project="sums")


def test_the_tracker_gets_the_configuration(run: FilesOfRun) -> None:
    known = tracked_run(run.paths.root, "wandb")
    assert (known.id, known.name, known.project) == ("0123abcd", "demo", "sums")
    assert known.config == {"name": "demo", "logging.project": "sums", "seed": 3, "evaluation.suites": "[]"}
    assert known.folder == run.paths.trackers


@pytest.mark.parametrize("value", [2e-6, 3, True, None])
def test_numbers_of_the_configuration_stay_numbers(run: FilesOfRun, value: Any) -> None:
    """A board sorts, filters and plots by them: 1e-05 as text lies behind 0.1, and equals no 0.00001."""
    config = {"name": "demo", "optimizer.lr": value}
    run.paths.config.write_text(json.dumps({"format": 2, "config": config}))
    assert tracked_run(run.paths.root, "wandb").config["optimizer.lr"] is not str(value)
    assert type(tracked_run(run.paths.root, "wandb").config["optimizer.lr"]) is type(value)


@pytest.mark.parametrize(
    ("kinds", "end"),
    [
        (["start", "done"], "done"),
        (["start", "checkpoint", "failed", "tracker_failed"], "failed"),
        (["start", "done", "resume", "preempted"], "preempted"),
        (["start", "stopped"], "stopped"),
        (["start", "done", "resume", "checkpoint"], "killed"),
        ([], "killed"),
    ],
)
def test_the_tracker_is_told_how_the_run_has_ended(run: FilesOfRun, kinds: list[str], end: str) -> None:
    """A run that failed is not shown as finished."""
    store, events = Store(), JsonlLog(run.paths.events)
    for kind in kinds:
        events.append({"kind": kind})
    run.step(1)
    assert observe(run, store)
    assert store.ends == [end]


def test_the_configuration_that_boards_get_has_no_keys(
    run: FilesOfRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "abcdef0123")
    config = {
        "name": "demo",
        "logging.project": "sums",
        "data.path": "x",
        "logging.on_event": ["https://hooks/T0/x"],
        "checkpoint.after_export": "put --key k {folder}",
        "reward.url": "http://me:word@host",
        "reward.settings": {"key": "abcdef0123", "url": "https://judge/v1?key=s3cret", "model": "m"},
    }
    run.paths.config.write_text(json.dumps({"format": 2, "config": config}))
    assert tracked_run(run.paths.root, "wandb").config == {
        "name": "demo",
        "logging.project": "sums",
        "data.path": "x",
        "reward.url": "http://***@host",
        "reward.settings": "{'key': '***', 'url': 'https://judge/v1?***', 'model': 'm'}",
    }


def test_the_former_field_names_the_project(run: FilesOfRun) -> None:
    config = {"name": "demo", "logging.wandb_project": "older"}
    run.paths.config.write_text(json.dumps({"format": 2, "config": config}))
    assert tracked_run(run.paths.root, "wandb").project == "older"


def test_the_former_field_names_the_project_of_wandb_alone(run: FilesOfRun) -> None:
    config = {"name": "demo", "logging.wandb_project": "older", "logging.project": "sums"}
    run.paths.config.write_text(json.dumps({"format": 2, "config": config}))
    found = [tracked_run(run.paths.root, name).project for name in ("wandb", "trackio", "mlflow")]
    assert found == ["older", "sums", "sums"]


@pytest.mark.parametrize(
    ("begun", "project"), [({}, "sums"), ({"step": 3}, "older"), ({"step": 3, "project": "sums"}, "sums")]
)
def test_a_run_that_an_earlier_version_began_stays_in_its_project(
    run: FilesOfRun, begun: dict[str, Any], project: str
) -> None:
    """There the former field was the project of every tracker; a server's board would be in two."""
    config = {"name": "demo", "logging.wandb_project": "older", "logging.project": "sums"}
    run.paths.config.write_text(json.dumps({"format": 2, "config": config}))
    if begun:
        run.state.write_text(json.dumps(begun))
    store = Store()
    store.can_tell = False
    for step in (4, 5):
        run.step(step)
        assert observe(run, store, step - 1)
    assert [one.project for one in store.opened] == 2 * [project]
    assert store.rows == [row(4), row(5)]


@pytest.mark.parametrize("stored", [0, 1, 2, 3, 4, 5])
def test_after_a_kill_the_observer_sends_the_missing_rows(run: FilesOfRun, stored: int) -> None:
    """Whatever its own file says: a tracker writes later than it is told, or its row was not noted."""
    store = Store()
    for step in (1, 2, 3):
        run.step(step)
        run.evaluation(step)
    rows = [one for step in (1, 2, 3) for one in (row(step), evaluation(step))]
    store.rows = rows[:stored]
    for said in (TrackerState(), TrackerState(step=3, evaluation=3), TrackerState(step=1)):
        write_state(run.state, said)
        store.rows = rows[:stored]
        assert observe(run, store, resume_step=3)
        assert store.rows == rows


def test_a_tracker_without_a_last_step_resumes_after_the_state_file(run: FilesOfRun) -> None:
    store = Store()
    store.can_tell = False
    for step in (1, 2, 3):
        run.step(step)
    write_state(run.state, TrackerState(step=2))
    assert observe(run, store, resume_step=3)
    assert store.rows == [row(3)]


def test_a_tracker_keeps_the_first_values_of_repeated_steps(run: FilesOfRun) -> None:
    """The run went back to the checkpoint of step 2; the tracker has steps 3 and 4 of before."""
    store = Store()
    store.rows = [row(1), row(2), row(3, x=7.0), row(4, x=7.0)]
    for step in (1, 2, 3, 4, 5):
        run.step(step)
    assert observe(run, store, resume_step=2)
    assert store.rows == [row(1), row(2), row(3, x=7.0), row(4, x=7.0), row(5)]
    assert read_state(run.state).kept == 4
    assert observe(run, store, resume_step=5)
    assert read_state(run.state).kept is None


class Waits:
    """An inbox whose pauses take no time. The run ends after some of them."""

    def __init__(self, at: int) -> None:
        self.left, self.pauses_s = at, list[float | None]()

    @property
    def is_ending(self) -> bool:
        return self.left <= 0

    def wait(self, limit_s: float | None = None) -> None:
        self.pauses_s.append(limit_s)
        self.left -= 1


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that take no time."""
    monkeypatch.setattr(following.Observer, "_pause", lambda self, limit_s: self._inbox.wait(limit_s))


@pytest.mark.usefixtures("instant")
def test_a_tracker_failure_is_retried_with_backoff(run: FilesOfRun) -> None:
    store, inbox = Store(), Waits(10)
    store.failures = [ConnectionError(f"attempt {number}") for number in range(9)]
    run.step(1)
    told: list[str | None] = []

    def opened(known: TrackedRun) -> Client:
        told.append(read_state(run.state).problem)
        return store.client(known)

    waiting: Any = inbox
    assert Observer(run.paths.root, "fake", 0, opened, waiting).observe()
    assert store.rows == [row(1)]
    assert told == [None, *(f"ConnectionError: attempt {number}" for number in range(9))]
    assert inbox.pauses_s == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 240.0, 240.0, 240.0, None]
    assert read_state(run.state) == TrackerState(step=1, attempts=9, project="sums")
    assert store.ends == [None] * 9 + ["killed"]  # None: the run goes on, and is tried again


@pytest.mark.usefixtures("instant")
def test_the_last_rows_have_one_more_attempt(run: FilesOfRun) -> None:
    store = Store()
    run.step(1)
    store.failures = [OSError("gone")] * 2
    waiting: Any = Waits(1)
    assert not Observer(run.paths.root, "fake", 0, store.client, waiting).observe()
    assert not store.failures
    assert read_state(run.state).problem == "OSError: gone"
    assert observe(run, store)
    assert store.rows == [row(1)]


def test_a_line_that_is_being_written_waits(run: FilesOfRun) -> None:
    rows = TrackedRows(run.paths)
    run.step(1)
    with run.paths.metrics.open("ab") as file:
        file.write(b'{"step": 2, "a":')
        file.flush()
        assert [one.step for one in rows.new()] == [1]
        assert not [*rows.new()]
        file.write(b" 1}\n")
    assert [*rows.new()] == [TrackedRow(2, False, {"a": 1.0})]


def test_the_rows_of_a_long_run_are_not_held_together(run: FilesOfRun) -> None:
    """At each start an observer reads all of them: of 50,000 steps they would take 460 MB."""
    numbers = "".join(f', "m{number}": {number}.5' for number in range(60))
    run.paths.metrics.write_text("".join(f'{{"step": {step}{numbers}}}\n' for step in range(1, 1001)))
    run.paths.evaluations.write_text('{"step": 0, "a": 1}\n{"step": 2, "a": 2}\n')
    tracemalloc.start()
    steps = [row.step for row in TrackedRows(run.paths).new()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert steps[:5] == [0, 1, 2, 2, 3]
    assert (len(steps), peak < 500_000) == (1002, True)  # of 6 MB


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1, "x": 2}', "null"])
def test_an_unreadable_state_file_is_an_initial_state(run: FilesOfRun, text: str) -> None:
    run.state.write_text(text)
    assert read_state(run.state) == TrackerState()


KEYS = {
    "WANDB_API_KEY": "abcdef0123",
    "MLFLOW_TRACKING_PASSWORD": "hunter22",
    "HF_TOKEN": "x",
    "HOME": "/root",
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key abcdef0123, again abcdef0123", "key ***, again ***"),
        ("https://me:hunter99@host:5000/x", "https://***@host:5000/x"),
        ("for hunter22 in /me, x", "for *** in /me, x"),
        ("http://h:1/?write_token=abc&project=x", "http://h:1/?write_token=***&project=x"),
        ("a/b@c.d", "a/b@c.d"),
    ],
)
def test_keys_are_not_printed(text: str, shown: str) -> None:
    assert redacted(text, KEYS) == shown


def test_what_packages_print_has_no_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123")
    stream: Any = RedactingStream(sys.stdout)
    print("login abcdef0123", file=stream)
    assert stream.isatty() is False
    assert capsys.readouterr().out == "login ***\n"


@pytest.mark.usefixtures("instant")
def test_a_problem_has_no_keys(run: FilesOfRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123")
    store = Store()
    run.step(1)
    store.failures = [OSError("no abcdef0123 at https://a:b@host")]
    waiting: Any = Waits(0)
    assert not Observer(run.paths.root, "fake", 0, store.client, waiting).observe()
    assert read_state(run.state).problem == "OSError: no *** at https://***@host"
