"""The process of a board gives each row of a run to its tracker, in order, whatever the tracker does."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.runtime.jsonl_log import JsonlLog, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records.following import Follower, TrackedRow, TrackedRows
from bapo_megatron.trainer.records.trackers import TrackedRun, redacted, tracked_run

Written = tuple[int, dict[str, float]]
PROJECT = {"logging.project": "sums"}


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

    def last_step(self) -> int | None:
        steps = [step for step, metrics in self._store.rows if "time/step_s" in metrics]
        return max(steps, default=-1) if self._store.can_tell else None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self._store.failures:
            raise self._store.failures.pop(0)
        self._store.rows.append((step, metrics))

    def close(self, end: str | None) -> None:
        self._store.ends.append(end)


class FilesOfRun:
    """A run directory that a test writes as a run does."""

    printed = ""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.paths.trackers.mkdir()
        self.paths.wandb_id.write_text("0123abcd")
        self.configured({})
        self.steps, self.evaluations = JsonlLog(self.paths.metrics), JsonlLog(self.paths.evaluations)

    def configured(self, config: dict[str, Any], tracker: str = "wandb") -> TrackedRun:
        """What a tracker gets of a run with this configuration."""
        self.paths.config.write_text(
            json.dumps({"format": 2, "config": {"name": "demo", **PROJECT, **config}})
        )
        return tracked_run(self.paths.root, tracker)

    @property
    def told(self) -> list[tuple[str, str]]:
        """The events: kind and message."""
        rows = read_jsonl(self.paths.events) if self.paths.events.exists() else []
        return [(row["kind"], row["message"]) for row in rows]

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


class Waits:
    """Waiting that takes no time. The run ends after so many waits."""

    def __init__(self, at: int) -> None:
        self.left, self.pauses_s = at, list[float]()
        self.after_a_poll: list[Callable[[], None]] = []

    def __call__(self, limit_s: float) -> bool:
        if limit_s == 1.0 and self.after_a_poll:
            self.after_a_poll.pop()()
        if limit_s:
            self.pauses_s.append(limit_s)
            self.left -= 1
        return self.left <= 0


def follow(
    run: FilesOfRun,
    store: Store,
    resume_step: int = 0,
    wait: Waits | None = None,
) -> bool:
    """Follow what is in the files, by default as a run's last rows."""
    console = io.StringIO()
    done = Follower(run.paths, "fake", resume_step, store.client, wait or Waits(0), console).follow()
    run.printed = console.getvalue()
    return done


def test_the_tracker_gets_each_row_in_order(run: FilesOfRun) -> None:
    store = Store()
    for step in (0, 2):
        run.evaluation(step)
    for step in (1, 2, 3):
        run.step(step, none=None, word="x", flag=True)
    assert follow(run, store)
    assert store.rows == [evaluation(0), row(1), row(2), evaluation(2), row(3)]
    assert len(store.ends) == 1
    assert not run.told


def test_the_tracker_gets_the_configuration(run: FilesOfRun) -> None:
    """Numbers stay numbers: a board sorts, filters and plots by them. The former field names the project, but
    for boards that it did not have."""
    fields = {"logging.project": "sums", "optimizer.lr": 2e-6, "seed": 3, "a": True, "b": None}
    known = run.configured({**fields, "evaluation.suites": []})
    assert (known.id, known.name, known.project) == ("0123abcd", "demo", "sums")
    assert known.config == {"name": "demo", **fields, "evaluation.suites": "[]"}
    assert {name: type(known.config[name]) for name in fields} == {n: type(v) for n, v in fields.items()}
    assert known.folder == run.paths.trackers
    former = {"logging.wandb_project": "older"}
    for tracker, project in (("wandb", "older"), ("trackio", "sums"), ("mlflow", "sums")):
        assert run.configured({**former, "logging.project": "sums"}, tracker).project == project


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
    assert follow(run, store)
    assert store.ends == [end]


def test_boards_get_a_configuration_without_keys(run: FilesOfRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "abcdef0123")
    config = {
        "data.path": "x",
        "logging.on_event": ["https://hooks/T0/x"],
        "checkpoint.after_export": "put --key k {folder}",
        "reward.url": "http://me:word@host",
        "reward.settings": {"key": "abcdef0123", "url": "https://judge/v1?key=s3cret", "model": "m"},
    }
    assert run.configured(config).config == {
        "name": "demo",
        **PROJECT,
        "data.path": "x",
        "reward.url": "http://***@host",
        "reward.settings": "{'key': '***', 'url': 'https://judge/v1?***', 'model': 'm'}",
    }


@pytest.mark.parametrize("stored", [0, 1, 2, 3, 4, 5])
def test_after_a_kill_a_board_with_a_last_step_gets_the_next_ones(run: FilesOfRun, stored: int) -> None:
    """Each step once, with its first values where the run went back to an earlier checkpoint. The evaluation
    of a board's last step is lost, where the kill came between them."""
    store = Store()
    for step in (1, 2, 3):
        run.step(step)
        run.evaluation(step)
    rows = [one for step in (1, 2, 3) for one in (row(step), evaluation(step))]
    first = [(step, {**values, "x": 7.0}) for step, values in rows[:stored]]
    store.rows = [*first]
    assert follow(run, store, resume_step=1 if stored > 2 else 3)
    lost = rows[stored : stored + 1] if stored % 2 else []
    assert store.rows == [*first, *(one for one in rows[stored:] if one not in lost)]


@pytest.mark.parametrize(("resume_step", "sent"), [(0, [0, 1, 2, 3]), (2, [3]), (3, [])])
def test_a_board_without_one_gets_new_rows(run: FilesOfRun, resume_step: int, sent: list[int]) -> None:
    store = Store()
    store.can_tell = False
    run.evaluation(0)
    for step in (1, 2, 3):
        run.step(step)
    assert follow(run, store, resume_step)
    assert [step for step, _ in store.rows] == sent


@pytest.mark.parametrize("can_tell", [True, False])
def test_a_failure_is_told_once_and_tried_again_each_minute(
    run: FilesOfRun, can_tell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the keys that it may name."""
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123")
    store, wait = Store(), Waits(10)
    store.can_tell = can_tell
    store.failures = [ConnectionError(f"attempt {number} with abcdef0123") for number in range(9)]
    run.step(1)
    run.step(2)
    assert follow(run, store, wait=wait)
    assert store.rows == [row(1), row(2)]
    assert wait.pauses_s == [60.0] * 9 + [1.0]
    [(kind, failed)] = run.told
    assert kind == "tracker_failed"
    assert failed == "fake: ConnectionError: attempt 0 with ***; it is tried again"
    assert run.printed.splitlines() == [f"warning: {failed}"]
    assert store.ends == [None] * 9 + ["killed"]  # None: the run continues, and is tried again


def test_each_outage_is_told(run: FilesOfRun) -> None:
    store, wait = Store(), Waits(4)
    run.step(1)
    store.failures = [OSError("first")]

    def again() -> None:
        run.step(2)
        store.failures.append(OSError("second"))

    wait.after_a_poll = [again]
    assert follow(run, store, wait=wait)
    assert store.rows == [row(1), row(2)]
    assert [message for _, message in run.told] == [
        f"fake: OSError: {which}; it is tried again" for which in ("first", "second")
    ]


def test_a_row_that_failed_is_sent_again(run: FilesOfRun) -> None:
    store = Store()
    store.can_tell = False
    run.step(1)
    assert follow(run, store, wait=Waits(1))
    run.step(2)
    store.failures = [OSError("gone")]
    assert follow(run, store, resume_step=1, wait=Waits(2))
    assert store.rows == [row(1), row(2)]
    run.step(3)
    store.failures = [OSError("gone")] * 2
    assert not follow(run, store, resume_step=2, wait=Waits(1)), "the last rows have one more attempt"
    assert not store.failures
    assert store.rows == [row(1), row(2)]


def test_a_line_that_is_being_written_waits(run: FilesOfRun) -> None:
    rows = TrackedRows(run.paths)
    run.evaluation(0)
    assert [one.step for one in rows.new()] == [0]
    run.step(1)
    with run.paths.metrics.open("ab") as file:
        file.write(b'{"step": 2, "a":')
        file.flush()
        assert [one.step for one in rows.new()] == [1]
        assert not [*rows.new()]
        file.write(b" 1}\n")
    assert [*rows.new()] == [TrackedRow(2, False, {"a": 1.0})]


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
    keys = {"WANDB_API_KEY": "abcdef0123", "MLFLOW_TRACKING_PASSWORD": "hunter22", "HF_TOKEN": "x"}
    assert redacted(text, {**keys, "HOME": "/root"}) == shown
