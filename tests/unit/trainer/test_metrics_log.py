"""Metrics arrive in the files and on boards, once for each step; boards may hang, fail or be killed."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from bapo_megatron.config import run as config
from bapo_megatron.errors import Preempted, RunStopped
from bapo_megatron.runtime.jsonl_log import JsonlLog, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records import metrics_log
from bapo_megatron.trainer.records.metrics_log import Boards, MetricsLog, evaluation_means, kept_score
from tests.support.waiting import until


def no_report(_kind: str, **_fields: Any) -> None:
    """Nothing is to be told."""
    raise AssertionError


FILES_ONLY = config.LoggingConfig(tensorboard=False)


def write_steps(
    run_dir: Path, logging: config.LoggingConfig, resume_step: int, last: int, reward: float
) -> None:
    """The part of a run from ``resume_step`` to ``last``: one step line and two update lines a step."""
    log = MetricsLog(RunPaths(run_dir), logging, resume_step, no_report)
    for step in range(resume_step + 1, last + 1):
        for update in range(2):
            log.write_update(step, {"update": update, "policy/loss": reward})
        log.write_step(step, {"reward/mean": reward, "policy/entropy": None, "policy/kl": math.nan})
    log.close()


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.mark.parametrize("resume_step", [0, 3])
def test_files_and_tensorboard_have_each_step_once_after_a_resume(tmp_path: Path, resume_step: int) -> None:
    """A line a step and one an update; the files go back to the checkpoint. TensorBoard has no None."""
    write_steps(tmp_path, config.LoggingConfig(), 0, 5, 0.25)
    write_steps(tmp_path, config.LoggingConfig(), resume_step, 6, 0.75)
    expected = [(step, 0.25 if step <= resume_step else 0.75) for step in range(1, 7)]
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"step": step, "reward/mean": mean, "policy/entropy": None, "policy/kl": None}
        for step, mean in expected
    ]
    updates = [(row["step"], row["update"]) for row in read_jsonl(tmp_path / "updates.jsonl")]
    assert updates == [(step, update) for step in range(1, 7) for update in (0, 1)]
    assert scalars(tmp_path, "reward/mean") == expected
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert tags == ["reward/mean"]


def test_evaluations_follow_a_run_that_goes_back(tmp_path: Path) -> None:
    """Of the weights that it continues from, an evaluation stays and is not written twice; later ones go."""
    log = MetricsLog(RunPaths(tmp_path), FILES_ONLY, 0, no_report)
    for step in (0, 2, 4):
        assert log.write_evaluation(step, {"eval/mean": step / 10})
    log.close()
    again = MetricsLog(RunPaths(tmp_path), FILES_ONLY, 2, no_report)
    assert evaluation_means(tmp_path) == {0: 0.0, 2: 0.2}
    assert not again.write_evaluation(2, {"eval/mean": 0.9})
    assert again.write_evaluation(4, {"eval/mean": 0.5})
    again.close()
    assert evaluation_means(tmp_path) == {0: 0.0, 2: 0.2, 4: 0.5}


def test_an_outage_in_an_evaluation_makes_no_best_checkpoint() -> None:
    """One response of 500 could be judged, and was right."""
    judged = {"eval/a/unjudged": 0.0, "eval/b/unjudged": 0.0, "eval/mean": 0.5}
    assert kept_score(judged) == 0.5
    assert kept_score({**judged, "eval/b/unjudged": 0.998, "eval/mean": 1.0}) == pytest.approx(0.002)
    assert kept_score({**judged, "eval/mean": None}) is None
    assert kept_score({"eval/mean": 0.25}) == 0.25  # of an earlier version


def test_a_full_disk_below_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard's own thread has it, too

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = MetricsLog(RunPaths(tmp_path), config.LoggingConfig(), 0, no_report)
    log.write_step(1, {"reward/mean": 0.5})
    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(RunStopped, match=r"the boards' data could not be written .*No space left"):
        log.write_step(2, {"reward/mean": 0.5})
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard."):
            thread.join(1)


LIMIT_S = 300.0
"""For what takes a second on an idle machine."""

FAKE = '''
"""A package of the name wandb, whose server is a file."""
import json, os, time
from pathlib import Path

FOLDER = Path(__file__).parents[1]
LOG = FOLDER / "served.jsonl"

def Settings(**settings):
    return settings

def rows():
    return [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []

class Run:
    offline = False
    starting_step = max((row["step"] + 1 for row in rows()), default=0)

    def log(self, metrics, step):
        fault = (FOLDER / "fault").read_text()
        if fault == "fails":
            raise OSError("the server answers " + os.environ["WANDB_API_KEY"])
        if fault == "dies":
            os._exit(3)
        while fault == "hangs":
            time.sleep(60)
        with LOG.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\\n")

    def finish(self, exit_code):
        (FOLDER / "finished").touch()

def init(**arguments):
    print("key", os.environ["WANDB_API_KEY"])
    with (FOLDER / "inits.jsonl").open("a") as file:
        file.write(json.dumps(arguments) + "\\n")
    return Run()
'''


class Board:
    """A run directory, and the fake server of its tracker."""

    def __init__(self, root: Path, server: Path) -> None:
        self.paths, self._server = RunPaths(root), server
        config = {"name": "demo", "logging.project": "sums"}
        self.paths.config.write_text(json.dumps({"format": 2, "config": config}))
        self._steps = JsonlLog(self.paths.metrics)
        JsonlLog(self.paths.evaluations).close()
        self.events: list[dict[str, Any]] = []
        self.fault("")

    def start(self, resume_step: int = 0, catch_up_s: float = LIMIT_S) -> Boards:
        return Boards(["wandb"], self.paths, resume_step, self.report, catch_up_s)

    def report(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def step(self, *steps: int) -> None:
        for step in steps:
            self._steps.append({"step": step, "time/step_s": 1.0})

    def fault(self, name: str) -> None:
        (self._server / "fault").write_text(name)

    def rows(self, name: str = "served") -> list[dict[str, Any]]:
        path = self._server / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def shown(self) -> list[int]:
        return [row["step"] for row in self.rows()]

    def wait_for(self, done: Callable[[], object]) -> None:
        until(done, lambda: (self.shown, self.events, self.log()))

    def log(self) -> str:
        return self.paths.tracker_log("wandb").read_text()


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    server = tmp_path / "server"
    (server / "wandb").mkdir(parents=True)
    (server / "wandb/__init__.py").write_text(FAKE)
    (tmp_path / "run").mkdir()
    monkeypatch.syspath_prepend(str(server))
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return Board(tmp_path / "run", server)


def process_of(boards: Boards) -> subprocess.Popen[bytes]:
    return boards._processes["wandb"]


def test_a_run_and_its_continuation_are_one_run(board: Board) -> None:
    """Each step once, also those that were made after the board's process was killed."""
    boards = board.start()
    board.step(1, 2)
    board.wait_for(lambda: board.shown == [1, 2])
    process_of(boards).kill()
    process_of(boards).wait()
    board.step(3, 4)
    for _ in range(2):
        boards.check()
    [event] = board.events
    assert event["kind"] == "tracker_failed"
    assert event["message"].startswith("wandb gets no more metrics (signal SIGKILL, logs/tracker-wandb.log)")
    boards.close()
    again = board.start(4)
    board.step(5)
    again.close()
    assert board.shown == [1, 2, 3, 4, 5]
    first, *others = board.rows("inits")
    assert all(other == first for other in others)
    assert (first["project"], first["name"], first["resume"]) == ("sums", "demo", "allow")
    assert first["id"] == board.paths.wandb_id.read_text()
    assert first["dir"] == str(board.paths.trackers)
    assert board.log().startswith("key ***\n")
    assert len(board.events) == 1


@pytest.mark.parametrize("preempted", [False, True])
def test_a_hanging_board_is_left(board: Board, preempted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end the run waits its limit, shorter when it is preempted, and reports what may be missing."""
    monkeypatch.setattr(metrics_log, "PREEMPTED_S", 0.25)
    boards = board.start(catch_up_s=LIMIT_S if preempted else 0.25)
    board.fault("hangs")
    board.step(1)
    if preempted:
        with pytest.raises(Preempted, match="told to stop"), closing(boards):
            raise Preempted("told to stop")
    else:
        boards.close()
    [event] = board.events
    assert event["kind"] == "tracker_behind"
    assert event["message"].startswith("wandb may lack the last steps (signal SIGKILL")
    board.fault("")
    board.start(1).close()
    assert board.shown == [1]  # the board names its last step: the next start sends the rest


def test_signals_to_all_processes_of_a_job_do_not_end_it(board: Board) -> None:
    boards = board.start()
    board.step(1)
    board.wait_for(lambda: board.shown == [1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(process_of(boards).pid, number)
    board.step(2)
    boards.close()
    assert board.shown == [1, 2]
    assert not board.events


def test_a_hanging_board_does_not_outlive_a_run_that_was_killed(board: Board) -> None:
    """Where nobody waits for it: it ends itself once its limit is over."""
    boards = board.start(catch_up_s=0.25)
    board.fault("hangs")
    board.step(1)
    process = process_of(boards)
    assert process.stdin is not None
    process.stdin.close()  # as the run's death does
    assert process.wait(LIMIT_S) == 1
