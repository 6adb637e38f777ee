"""`bapo status` on run directories written by hand."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.run_directory import FORMAT
from bapo_megatron.commands.cluster import run_job, status
from bapo_megatron.commands.cluster.run_job import read_job_state
from bapo_megatron.commands.cluster.status import (
    _files_now,
    ago,
    read_status,
    status_command,
    status_text,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import file_time

NOW = 1_800_000_000.0
STATE = "job=41\nrestart=2\nstatus=running\nend=1800003600\nnodes=n1 n2\nexcluded=n3\ncrash=1\ntime_limit=4\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 500 steps after step 120, by a job that Slurm says is running."""
    run = tmp_path / "run"
    (run / "checkpoints/step_000110").mkdir(parents=True)
    (run / "checkpoints/step_000120").mkdir()
    manifest = run / "checkpoints/step_000110/manifest.json"
    manifest.write_text("{}")
    os.utime(manifest, (NOW - 240, NOW - 240))
    (run / "config.json").write_text(json.dumps({"format": FORMAT, "config": {"steps": 500}}))
    rows: list[dict[str, Any]] = [
        {"step": 119},
        {"step": 120, "reward/mean": 0.5123, "time/tokens_per_s": 8123.4, "time/step_s": 60.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 12')
    add_event(run, 3600, kind="engine_lost", engine="http://n7:1", reason="gone")
    add_event(run, 1800, kind="checkpoint", step=110)
    (run / "slurm.state").write_text(STATE)
    (run / "engines").mkdir()
    of_jobs = (("a", "ready", 5, 41), ("b", "ready", 100, 41), ("c", "starting", 5, 41))
    for name, state, age, job in (*of_jobs, ("former", "ready", 9000, 40)):
        file = run / f"engines/{name}.json"
        file.write_text(json.dumps({"url": f"http://{name}", "state": state, "job": job}))
        os.utime(file, (NOW - age, NOW - age))
    os.utime(run / "metrics.jsonl", (NOW - 30, NOW - 30))
    queue(monkeypatch, ("RUNNING", ""))
    return run


def add_event(run: Path, age_s: float = 0, **fields: Any) -> None:
    when = datetime.fromtimestamp(NOW - age_s, UTC).isoformat()
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps({"time": when, **fields}) + "\n")


def queue(monkeypatch: pytest.MonkeyPatch, answer: tuple[str, str] | None) -> None:
    """What squeue tells of every job."""
    for module in (status, run_job):
        monkeypatch.setattr(module, "queue_state", lambda _job: answer)


def text_of(run: Path) -> str:
    return status_text(read_status(run, NOW))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """By this process."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_status_shows_every_known_field(run: Path) -> None:
    assert text_of(run).splitlines()[1:] == [
        "job         41, RUNNING, restart 2, on n1 n2, 1:00:00 left",
        "step        120 of 500, 30 s ago, reward 0.512, 8,123 tokens/s, 6:20:00 to go at 60.0 s a step",
        "checkpoint  step 110, 4 min ago",  # step 120 has no manifest yet
        "engines     1 of 3 alive",
        "requeues    crash 1, preemption 0, time limit 4, node 0, storage 0, engines 0, health 0",
        "left out    n3",
        "last error  60 min ago: engine lost: gone: http://n7:1",
    ]
    add_event(run, kind="export_failed", step=110, message="full")
    assert read_status(run, NOW).trouble == "export failed: full"
    add_event(run, kind="job_stopped", why="no newer checkpoint", cause="ValueError: x", reason="crash")
    assert "job stopped: crash: ValueError: x: no newer checkpoint" in text_of(run)


def test_the_checkpoint_of_a_run(run: Path) -> None:
    folder = run / "checkpoints/step_000110_update_002"  # in the middle of a step
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    os.utime(folder / "manifest.json", (NOW - 60, NOW - 60))
    assert "checkpoint  step 110, 60 s ago\n" in text_of(run)
    shutil.rmtree(run / "checkpoints")
    assert "checkpoint  none yet\n" in text_of(run)
    (run / "journal").mkdir()
    (run / "journal/segments-000001.log").touch()
    kept = "checkpoint  none yet; responses are kept, and the same command continues with them\n"
    assert kept in text_of(run)


def test_files_are_as_old_as_by_their_own_clock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node a quarter of an hour off calls no live server dead and no dead one live."""
    monkeypatch.setattr(status, "file_time", lambda _folder: NOW)
    monkeypatch.setattr(status.time, "time", lambda: NOW + 900)
    text = status_text(read_status(run))
    assert "engines     1 of 3 alive\n" in text
    assert "checkpoint  step 110, 4 min ago\n" in text
    assert "step        120 of 500, 30 s ago" in text


def test_the_clock_of_the_files_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not this machine's, and no file is left; this machine's where a disk takes no file or tells none."""
    (tmp_path / "before").touch()
    stamped = (tmp_path / "before").stat().st_mtime
    with monkeypatch.context() as patch:
        patch.setattr("bapo_megatron.runtime.files.time.time", lambda: NOW)
        assert stamped - 1 <= file_time(tmp_path) < NOW - 1000
        assert [path.name for path in tmp_path.iterdir()] == ["before"]
        assert file_time(tmp_path / "gone") == NOW
    monkeypatch.setattr(status, "_CLOCK_S", 0.1)
    monkeypatch.setattr(status, "file_time", lambda _folder: time.sleep(3600))
    before = time.time()
    assert before <= _files_now(tmp_path) <= time.time()


@pytest.mark.parametrize(
    ("queued", "job_status", "told", "is_on_nodes"),
    [
        (("RUNNING", ""), "requeued", "RUNNING", True),
        (("REQUEUE_HOLD", ""), "running", "REQUEUE_HOLD", None),
        # Nodes and engines of its last start may be dead, and are no longer its own.
        (("PENDING", "BeginTime"), "requeued", "PENDING (BeginTime)", False),
        (("", ""), "running", "not in the queue; it was running, and ended without", None),
        (("", ""), "stopped", "stopped", False),
        (("CANCELLED", ""), "requeued", "CANCELLED; it was requeued, and ended without", None),
        (("COMPLETED", ""), "done", "done", None),
        (None, "running", "running (Slurm does not answer here)", None),
    ],
)
def test_the_state_of_a_job(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    queued: tuple[str, str] | None,
    job_status: str,
    told: str,
    is_on_nodes: bool | None,
) -> None:
    """Engines of its own node are in no registry: its last metrics say that one was alive."""
    (run / "slurm.state").write_text(STATE.replace("status=running", f"status={job_status}"))
    queue(monkeypatch, queued)
    assert f"job         41, {told}" in text_of(run)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 120, "sampler/engines": 1.0}) + "\n")
    for registered in (True, False):
        if is_on_nodes is not None:
            assert ("alive" in text_of(run)) is is_on_nodes, registered
            assert (" on " in text_of(run).splitlines()[1]) is (is_on_nodes or told == job_status)
        shutil.rmtree(run / "engines", ignore_errors=True)


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ((), "not running"),
        (("start", "done"), "not running, done"),
        (("start", "stopped", "resume", "preempted", "export_done"), "not running, preempted"),
        (
            ("start", "done", "resume", "checkpoint"),
            "not running here, and no end is recorded: killed, or on another machine",
        ),
    ],
)
def test_how_a_local_run_ended(run: Path, kinds: tuple[str, ...], told: str) -> None:
    """Its last metrics say that an engine was alive; it is not any more."""
    (run / "slurm.state").unlink()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 120, "sampler/engines": 1.0}) + "\n")
    shutil.rmtree(run / "engines")
    (run / "events.jsonl").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in kinds))
    (run / ".lock").touch()
    assert f"job         {told}\n" in text_of(run)
    assert "alive" not in text_of(run)


def test_a_local_run_that_is_running(run: Path) -> None:
    """Engines of its own are in no registry: its last metrics say how many are alive."""
    (run / "slurm.state").unlink()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 120, "sampler/engines": 1.0}) + "\n")
    shutil.rmtree(run / "engines")
    for servers, known in (({}, 1), ({"servers": 4}, 4), ({"urls": ["http://a:1", "http://b:1"]}, 2)):
        config = {f"rollout.sglang.{name}": value for name, value in servers.items()}
        stored = {"format": FORMAT, "config": {"rollout.engine": "sglang", **config}}
        (run / "config.json").write_text(json.dumps(stored))
        with locked(run / ".lock"):
            text = text_of(run)
        assert f"job         running here, process {os.getpid()}" in text
        assert f"engines     1 of {known} alive\n" in text


def test_a_run_that_goes_on_by_hand_after_its_job(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's end, and its dead servers, are not those of the run."""
    queue(monkeypatch, ("", ""))
    (run / "slurm.state").write_text(STATE.replace("status=running", "status=stopped"))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 120, "sampler/engines": 1.0}) + "\n")
    for file in (run / "engines").iterdir():
        os.utime(file, (NOW - 1000, NOW - 1000))
    with locked(run / ".lock"):
        lines = text_of(run).splitlines()
    assert lines[1] == f"job         running here, process {os.getpid()}"
    assert "engines     1 of 1 alive" in lines
    assert not [line for line in lines if line.startswith("requeues")]
    assert "job         41, stopped, restart 2" in text_of(run)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_status(tmp_path)
    assert read_job_state(tmp_path) is None
    (tmp_path / "events.jsonl").touch()
    text = text_of(tmp_path)
    assert "step        none yet" in text
    assert "checkpoint  none yet" in text
    assert "error" not in text


def test_a_file_system_that_hangs_does_not_hang_status(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To open a pipe waits for its other end, as to read from a server that is gone waits for it."""
    status_command([str(run)])
    assert "step        120 of 500" in capsys.readouterr().out
    os.mkfifo(run / "hangs")
    monkeypatch.setattr(status, "read_job_state", lambda run: (run / "hangs").read_text())
    monkeypatch.setattr(status, "_STATUS_DEADLINE_S", 0.5)
    with pytest.raises(SystemExit, match="has not answered for 0.5 s: its file system hangs"):
        status_command([str(run)])


def test_an_age_in_words() -> None:
    words = ["5 s ago", "10 min ago", "2 hours ago", "2 days ago"]
    assert [ago(seconds) for seconds in (5.0, 600.0, 7200.0, 2e5)] == words
