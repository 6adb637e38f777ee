"""`bapo status` and `bapo logs` on run directories written by hand."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.run_directory import FORMAT
from bapo_megatron.commands.cluster import run_job
from bapo_megatron.commands.cluster.run_job import (
    cancel,
    follow_logs,
    lock_holder,
    newest_logs,
    read_job_state,
    show_logs,
)
from bapo_megatron.commands.cluster.status import (
    _files_now,
    ago,
    read_status,
    rows_from_end,
    status_command,
    status_text,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import within
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
    events = [
        {
            "time": "2027-01-15T07:00:00.000+00:00",
            "kind": "engine_lost",
            "engine": "http://n7:1",
            "reason": "gone",
        },
        {"time": "2027-01-15T07:30:00.000+00:00", "kind": "checkpoint", "step": 110},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    (run / "slurm.state").write_text(STATE)
    (run / "engines").mkdir()
    for name, state, age in (("a", "ready", 5), ("b", "ready", 100), ("c", "starting", 5)):
        file = run / f"engines/{name}.json"
        file.write_text(json.dumps({"url": f"http://{name}", "state": state}))
        os.utime(file, (NOW - age, NOW - age))
    os.utime(run / "metrics.jsonl", (NOW - 30, NOW - 30))
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.queue_state", lambda _job: ("RUNNING", ""))
    return run


def test_a_failed_export_is_the_last_error(run: Path) -> None:
    failed = {
        "time": "2027-01-15T07:40:00.000+00:00",
        "kind": "export_failed",
        "step": 110,
        "message": "full",
    }
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    assert read_status(run, NOW).trouble == "export failed: full"


def test_status_shows_every_known_field(run: Path) -> None:
    assert status_text(read_status(run, NOW)).splitlines()[1:] == [
        "job         41, RUNNING, restart 2, on n1 n2, 1:00:00 left",
        "step        120 of 500, reward 0.512, 8,123 tokens/s, 6:20:00 to go at 60.0 s a step",
        "checkpoint  step 110, 4 min ago",  # step 120 has no manifest yet
        "engines     1 of 3 alive",
        "requeues    crash 1, preemption 0, time limit 4, node 0, storage 0, engines 0, health 0",
        "left out    n3",
        "last error  60 min ago: engine lost: gone: http://n7:1",
    ]


@pytest.mark.parametrize(
    ("moved", "said"),
    [
        (0.5, "moved in 25% of the stale updates of the last 2 steps"),
        (0.0, "moved in 0% of the stale updates of the last 2 steps, which equal fixed(0.6, 1.2) there"),
    ],
)
def test_bounds_that_do_not_move_are_named(run: Path, moved: float, said: str) -> None:
    """Two steps, in one of which a bound moved in this share of the stale updates; the third had none."""
    starts = {"algorithm.bounds.low_start": 0.6, "algorithm.bounds.high_start": 1.2}
    (run / "config.json").write_text(json.dumps({"format": FORMAT, "config": {"steps": 500, **starts}}))
    rows = [{"step": 119 + i, "bapo/bounds_moved": share} for i, share in enumerate((0.0, None, moved))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"bounds      {said}\n" in status_text(read_status(run, NOW))


def test_a_run_without_recent_steps_is_stalled(run: Path) -> None:
    """Its steps take a minute: ten minutes of silence are a stall, unless it is not running."""
    for path in (run / "metrics.jsonl", run / "checkpoints"):
        os.utime(path, (NOW - 700, NOW - 700))
    assert "stalled     no step, evaluation or rollout for 0:11:40\n" in status_text(read_status(run, NOW))
    os.utime(run / "metrics.jsonl", (NOW - 500, NOW - 500))
    assert read_status(run, NOW).stalled_s is None


@pytest.mark.parametrize("ahead_s", [900, -900])
def test_files_are_as_old_as_by_their_own_clock(
    run: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """A login node a quarter of an hour off calls no live server dead, no dead one live, no run stalled."""
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.file_time", lambda _folder: NOW)
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.time.time", lambda: NOW + ahead_s)
    for path in (run / "metrics.jsonl", run / "checkpoints"):
        os.utime(path, (NOW - 30, NOW - 30))
    text = status_text(read_status(run))
    assert "engines     1 of 3 alive\n" in text
    assert "checkpoint  step 110, 4 min ago\n" in text
    assert "stalled" not in text


def test_the_clock_of_the_files_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not this machine's, and no file is left; this machine's where the folder takes no file."""
    (tmp_path / "before").touch()
    stamped = (tmp_path / "before").stat().st_mtime
    monkeypatch.setattr("bapo_megatron.runtime.files.time.time", lambda: NOW)
    assert stamped - 1 <= file_time(tmp_path) < NOW - 1000
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    assert file_time(tmp_path / "gone") == NOW


def test_a_mid_step_checkpoint_counts(run: Path) -> None:
    folder = run / "checkpoints/step_000110_update_002"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    os.utime(folder / "manifest.json", (NOW - 60, NOW - 60))
    status = read_status(run, NOW)
    assert (status.checkpoint, status.checkpoint_age_s) == (110, 60)


@pytest.mark.parametrize(
    ("queued", "status", "told"),
    [
        (("PENDING", "BeginTime"), "requeued", "PENDING (BeginTime)"),
        (("", ""), "running", "not in the queue; it ended without a record"),
        (("", ""), "stopped", "stopped"),
        (("", ""), "requeued", "not in the queue; it was cancelled before it started again"),
        (("CANCELLED", ""), "requeued", "CANCELLED; it was cancelled before it started again"),
        (("COMPLETED", ""), "done", "done"),
        (None, "running", "running (Slurm does not answer here)"),
    ],
)
def test_the_state_of_a_job(
    run: Path, monkeypatch: pytest.MonkeyPatch, queued: Any, status: str, told: str
) -> None:
    (run / "slurm.state").write_text(STATE.replace("status=running", f"status={status}"))
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.queue_state", lambda _job: queued)
    assert read_status(run, NOW).state == told


def test_a_pending_job_has_no_nodes_and_no_engines(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its last start may be dead, and are no longer its own."""
    (run / "slurm.state").write_text(STATE.replace("status=running", "status=requeued"))
    queued = ("PENDING", "BeginTime")
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.queue_state", lambda _job: queued)
    text = status_text(read_status(run, NOW))
    assert "PENDING (BeginTime), restart" in text
    assert " on " not in text.splitlines()[1]
    assert "alive" not in text
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.queue_state", lambda _job: ("RUNNING", ""))
    text = status_text(read_status(run, NOW))
    assert " on " in text.splitlines()[1]
    assert "alive" in text


def test_the_last_error_is_shown_with_its_kind_and_consequence(run: Path) -> None:
    event = {"kind": "job_stopped", "why": "no newer checkpoint", "cause": "ValueError: x", "reason": "crash"}
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps(event) + "\n")
    assert "job stopped: crash: ValueError: x: no newer checkpoint" in status_text(read_status(run, NOW))


def test_a_local_run_needs_no_slurm(run: Path) -> None:
    (run / "slurm.state").unlink()
    assert "job         not running" in status_text(read_status(run, NOW))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert lock_holder(run) == os.getpid()
        assert f"job         running here, process {os.getpid()}" in status_text(read_status(run, NOW))


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (("start", "done"), "not running, done"),
        (("start", "stopped", "resume", "preempted", "after_export_done"), "not running, preempted"),
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
    with (run / ".lock").open("w") as lock:
        assert f"job         {told}\n" in (text := status_text(read_status(run, NOW)))
        assert "alive" not in text
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "engines     1 of 1 alive\n" in status_text(read_status(run, NOW))


@pytest.mark.parametrize("status", ["stopped", "done", "cancelled"])
def test_a_job_that_is_over_has_no_engines(run: Path, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """Those of its own node are in no registry: its last metrics say that one was alive."""
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.queue_state", lambda _job: ("", ""))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 120, "sampler/engines": 1.0}) + "\n")
    (run / "slurm.state").write_text(STATE.replace("status=running", f"status={status}"))
    for registered in (True, False):
        text = status_text(read_status(run, NOW))
        assert f", {status}, restart" in text
        assert "alive" not in text, registered
        shutil.rmtree(run / "engines", ignore_errors=True)


@pytest.mark.parametrize("status", ["stopped", "done", "cancelled", "requeued"])
def test_a_run_that_goes_on_by_hand_after_its_job(
    run: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """The job's end, and its dead servers, are not those of the run."""
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.queue_state", lambda _job: ("", ""))
    (run / "slurm.state").write_text(STATE.replace("status=running", f"status={status}"))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 120, "sampler/engines": 1.0}) + "\n")
    for file in (run / "engines").iterdir():
        os.utime(file, (NOW - 1000, NOW - 1000))
    events = [{"kind": kind} for kind in ("job_start", "start", "failed", "job_stopped", "resume")]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = status_text(read_status(run, NOW)).splitlines()
    assert lines[1] == f"job         running here, process {os.getpid()}"
    assert "engines     1 of 1 alive" in lines
    assert not [line for line in lines if line.startswith("requeues")]
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "done"}) + "\n")
    assert "job         not running, done\n" in status_text(read_status(run, NOW))
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "job_stopped"}) + "\n")
    assert f"job         41, {read_status(run, NOW).state}, restart 2" in status_text(read_status(run, NOW))


def test_a_job_that_waits_is_not_hidden_by_an_earlier_start_by_hand(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was tried by hand, then submitted: its job waits, and has written no event."""
    answer = ("PENDING", "Priority")
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.queue_state", lambda _job: answer)
    (run / "slurm.state").unlink()
    (run / "logs").mkdir()
    (run / "logs/submitted.job").write_text("57\n")
    os.utime(run / "logs/submitted.job", (NOW - 100, NOW - 100))

    def add(kind: str, age_s: float) -> None:
        when = datetime.fromtimestamp(NOW - age_s, UTC).isoformat()
        with (run / "events.jsonl").open("a") as log:
            log.write(json.dumps({"time": when, "kind": kind}) + "\n")

    add("start", 500)
    add("preempted", 400)
    assert "job         57, PENDING (Priority), restart 0\n" in status_text(read_status(run, NOW))
    answer = ("", "")
    assert "57, not in the queue; it ended before its script began" in status_text(read_status(run, NOW))
    add("resume", 50)
    add("done", 20)
    assert "job         not running, done\n" in status_text(read_status(run, NOW))


def test_a_start_is_as_long_ago_as_by_the_clock_that_wrote_its_time(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a server a quarter of an hour ahead: a run that began five minutes ago is not stalled."""
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.file_time", lambda _folder: NOW + 900)
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.time.time", lambda: NOW)
    for path in (run / "metrics.jsonl", run / "checkpoints"):
        os.utime(path, (NOW - 9000, NOW - 9000))
    event = {"time": datetime.fromtimestamp(NOW - 300, UTC).isoformat(), "kind": "resume"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    os.utime(run / "events.jsonl", (NOW - 9000, NOW - 9000))
    assert read_status(run).stalled_s is None
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.time.time", lambda: NOW + 900)
    assert read_status(run).stalled_s == 1200


def test_checkpoints_that_may_be_listed_and_not_entered_do_not_end_status(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another user; root, who runs these tests here and there, may enter all."""

    def refused(self: Path) -> bool:
        if self.name == "manifest.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return os.path.exists(self)

    monkeypatch.setattr(Path, "exists", refused)
    assert "checkpoint  none yet\n" in status_text(read_status(run, NOW))


def test_a_run_that_was_killed_before_its_first_checkpoint_keeps_its_responses(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert "checkpoint  none yet\n" in status_text(read_status(run, NOW))
    (run / "journal").mkdir()
    (run / "journal/segments-000001.log").touch()
    kept = "checkpoint  none yet; responses are kept, and the same command continues with them\n"
    assert kept in status_text(read_status(run, NOW))


def test_an_entry_of_a_server_that_is_a_link_counts_as_a_dead_server(run: Path) -> None:
    """The job passes over it, too; `bapo status` must not end at it."""
    entry = sorted((run / "engines").iterdir())[0]
    (run / "elsewhere").write_text(entry.read_text())
    entry.unlink()
    entry.symlink_to(run / "elsewhere")
    engines = read_status(run, NOW).engines
    assert engines is not None
    assert engines[1] == 3


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    text = status_text(read_status(tmp_path, NOW))
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
    monkeypatch.setattr(
        "bapo_megatron.commands.cluster.status.read_job_state", lambda run: (run / "hangs").read_text()
    )
    monkeypatch.setattr("bapo_megatron.commands.cluster.status._STATUS_DEADLINE_S", 0.5)
    with pytest.raises(SystemExit, match="has not answered for 0.5 s: its file system hangs"):
        status_command([str(run)])


def test_within_raises_the_errors_of_its_function() -> None:
    def ask() -> str:
        raise ConfigError("no such run")

    assert within(10, lambda: "well") == "well"
    with pytest.raises(ConfigError, match="no such run"):
        within(10, ask)


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_status(tmp_path)
    assert read_job_state(tmp_path) is None


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n7\n\n{"st')
    assert list(rows_from_end(path)) == [{"step": 1}]
    assert list(rows_from_end(tmp_path / "no")) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5.0, "5 s ago"), (600.0, "10 min ago"), (7200.0, "2 hours ago"), (2e5, "2 days ago")],
)
def test_ages(seconds: float, words: str) -> None:
    assert ago(seconds) == words


def test_logs_are_those_of_the_newest_start(run: Path) -> None:
    for job, restart in ((9, 0), (41, 9), (41, 10)):
        folder = run / f"logs/{job}/{restart}"
        folder.mkdir(parents=True)
        for name in ("job", "trainer-n1-0", "trainer-n1-1", "trainer-n2-10", "rollout-n3-0"):
            (folder / f"{name}.log").write_text(f"{job} {restart} {name}\n")
    names = ["job.log", "rollout-n3-0.log", "trainer-n1-0.log"]
    assert newest_logs(run) == [run / "logs/41/10" / name for name in names]
    assert len(newest_logs(run, every_rank=True)) == 5
    out = io.StringIO()
    show_logs(run, out)
    assert "==> logs/41/10/trainer-n1-0.log <==\n41 10 trainer-n1-0\n" in out.getvalue()


def test_following_shows_what_is_new_and_the_next_start(run: Path) -> None:
    first, second = run / "logs/41/0/job.log", run / "logs/41/1/job.log"
    first.parent.mkdir(parents=True)
    first.write_text("old\n")
    out, turns = io.StringIO(), iter(range(3))

    def is_following() -> bool:
        turn = next(turns)
        if turn == 0:
            first.write_text("old\nnew\n")
        elif turn == 1:
            second.parent.mkdir()
            second.write_text("again\n")
        return turn < 2

    follow_logs(run, out, is_following=is_following)
    assert out.getvalue() == (
        "==> logs/41/0/job.log <==\nold\n==> logs/41/0/job.log <==\nnew\n==> logs/41/1/job.log <==\nagain\n"
    )


def test_following_logs_does_not_ask_slurm_twice_a_second(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second job waits while the first trains: whose logs, only Slurm knows."""
    asked: list[str] = []

    def squeue(job: str) -> tuple[str, str]:
        asked.append(job)
        return "RUNNING", ""

    monkeypatch.setattr(run_job, "queue_state", squeue)
    monkeypatch.setattr(run_job.time, "sleep", lambda _s: None)
    (run / "logs/41/2").mkdir(parents=True)
    (run / "logs/41/2/job.log").write_text("it trains\n")
    (run / "logs/submitted.job").write_text("57\n")
    looks = iter([True] * 50 + [False])
    follow_logs(run, io.StringIO(), is_following=lambda: next(looks))
    assert 1 <= len(asked) <= 4, asked


def test_missing_logs_and_jobs_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="writes to its terminal"):
        show_logs(tmp_path, io.StringIO())
    with pytest.raises(ConfigError, match="is not running here"):
        cancel(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        cancel(tmp_path / "no")


def test_the_logs_are_those_of_the_job_that_trains(run: Path) -> None:
    """A later job of eval.sbatch or convert.sbatch has its logs beside them."""
    for name in ("41/2/job.log", "41/2/trainer-n1-0.log", "57/0/job.log", "57/0/eval-n9-0.log"):
        path = run / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert newest_logs(run) == [run / "logs/41/2/job.log", run / "logs/41/2/trainer-n1-0.log"]
    (run / "slurm.state").unlink()
    assert newest_logs(run) == [run / "logs/57/0/job.log"]


def test_a_job_that_could_not_be_told_to_stop_does_not_stop_at_its_next_time_limit(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*command: str) -> str:
        assert (run / "stop").exists()
        raise run_job.SlurmError(f"{command[0]}: Unable to contact slurm controller")

    monkeypatch.setattr(run_job, "queue_state", lambda _job: ("RUNNING", ""))
    monkeypatch.setattr(run_job, "call_slurm", refused)
    with pytest.raises(ConfigError, match="job 41 could not be cancelled: scancel: Unable to contact"):
        cancel(run)
    assert not (run / "stop").exists()


@pytest.mark.parametrize("job", ["--user=me", "12 --user=me", "../../..", "12,13", "-1"])
def test_a_state_file_names_no_argument_of_slurm(
    run: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bapo cancel --now` would have called `scancel --user=me`, which ends all jobs of the user."""
    monkeypatch.setattr(run_job, "call_slurm", lambda *command: pytest.fail(f"called {command}"))
    (run / "slurm.state").write_text(STATE.replace("job=41", f"job={job}"))
    for ask in (
        lambda: run_job.cancel(run, at_once=True),
        lambda: read_status(run),
    ):
        with pytest.raises(ConfigError, match=f"slurm.state: job='{job}' is not a job of Slurm"):
            ask()


def test_no_answer_of_slurm_is_not_an_empty_queue(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_job, "queue_state", lambda _job: None)
    with pytest.raises(ConfigError, match="Slurm does not answer, so job 41 of .* is not cancelled"):
        cancel(run)


def test_a_lock_that_is_a_link_names_no_process_to_end(tmp_path: Path) -> None:
    """It may lead to the lock of anything that runs here, which `bapo cancel` would end."""
    with (tmp_path / "other").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (tmp_path / "run").mkdir()
        (tmp_path / "run/.lock").symlink_to(tmp_path / "other")
        assert lock_holder(tmp_path / "run") is None
        (tmp_path / "run/.lock").unlink()
        (tmp_path / "other").rename(tmp_path / "run/.lock")
        assert lock_holder(tmp_path / "run") == os.getpid()


def test_a_lock_of_another_file_with_the_same_inode_number_is_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another file system: `bapo cancel` would end whatever holds it."""
    (tmp_path / ".lock").touch()
    inode = (tmp_path / ".lock").stat().st_ino
    real = Path.read_text

    def locks(path: Path, *rest: Any, **more: Any) -> str:
        if path != Path("/proc/locks"):
            return real(path, *rest, **more)
        return f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:2a:{inode} 0 EOF\n"

    monkeypatch.setattr(Path, "read_text", locks)
    assert lock_holder(tmp_path) is None
    with (tmp_path / ".lock").open():
        assert lock_holder(tmp_path) == os.getpid()


def test_a_users_defaults_of_squeue_do_not_hide_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQUEUE_STATES=RUNNING hides a job that waits: `bapo cancel` would find none in the queue."""
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ -n "$SQUEUE_STATES" ] || echo "PENDING|Priority"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    assert run_job.queue_state("41") == ("PENDING", "Priority")


@pytest.mark.parametrize("state", ["SIGNALING", "REQUEUE_HOLD", "STAGE_OUT"])
def test_a_job_that_slurm_still_has_did_not_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.queue_state", lambda _job: (state, ""))
    assert read_status(run).state == state


def test_a_job_that_slurm_is_signalling_is_told_to_save(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(run_job, "queue_state", lambda _job: ("SIGNALING", ""))
    monkeypatch.setattr(run_job, "call_slurm", lambda *command: called.append(command))
    assert "told to save and stop" in cancel(run)
    assert called == [("scancel", "--batch", "--signal=USR1", "41")]


def test_a_job_that_waits_for_its_first_start_has_a_status_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for days, and the commands that `bapo submit` names must work until it begins."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/submitted.job").write_text("41\n")
    called: list[tuple[str, ...]] = []

    def answer(*command: str) -> str:
        called.append(command)
        return "PENDING|Priority\n" if command[0] == "squeue" else ""

    monkeypatch.setattr(run_job, "call_slurm", answer)
    assert "41, PENDING (Priority), restart 0" in status_text(read_status(tmp_path))
    assert cancel(tmp_path) == "job 41 is cancelled"
    assert called[-1] == ("scancel", "41")
    with pytest.raises(ConfigError, match="a job that waits has none yet"):
        show_logs(tmp_path, io.StringIO())
    monkeypatch.setattr(run_job, "call_slurm", lambda *_: "")
    (tmp_path / "logs/sbatch_bapo-x_41.out").write_text("/shared/slurm/lib/job.sh: No such file\n")
    assert "not in the queue; it ended before its script began" in read_status(tmp_path).state
    assert [path.name for path in newest_logs(tmp_path)] == ["sbatch_bapo-x_41.out"]


@pytest.mark.parametrize(
    ("status", "before", "job"),
    [
        ("stopped", None, "57"),
        ("running", ("RUNNING", ""), "41"),
        ("requeued", ("PENDING", ""), "41"),
        ("requeued", ("REQUEUE_HOLD", ""), "41"),  # `bapo cancel` must find it
        ("running", ("SUSPENDED", ""), "41"),
        ("running", ("", ""), "57"),  # scancel has ended it
        ("running", None, "41"),  # Slurm does not answer
    ],
)
def test_a_submitted_job_is_the_runs_once_the_one_before_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, before: tuple[str, str] | None, job: str
) -> None:
    monkeypatch.setattr(run_job, "queue_state", lambda _job: before)
    (tmp_path / "slurm.state").write_text(f"job=41\nstatus={status}\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/submitted.job").write_text("57\n")
    found = read_job_state(tmp_path)
    assert found is not None
    assert found.job == job
    (tmp_path / "slurm.state").write_text("job=57\nstatus=done\n")
    found = read_job_state(tmp_path)
    assert found is not None
    assert (found.job, found.status) == ("57", "done")


def test_a_disk_that_tells_no_time_does_not_hold_the_status_up(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read, and takes no write: then this machine's clock counts."""
    monkeypatch.setattr("bapo_megatron.commands.cluster.status._CLOCK_S", 0.1)
    monkeypatch.setattr("bapo_megatron.commands.cluster.status.file_time", lambda _folder: time.sleep(3600))
    before = time.time()
    assert before <= _files_now(run) <= time.time()
