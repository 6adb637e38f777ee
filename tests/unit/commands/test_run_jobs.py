"""`bapo logs` and `bapo cancel` on run directories written by hand, and which job is the run's."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.commands.cluster import run_job
from bapo_megatron.commands.cluster.run_job import (
    cancel,
    follow_logs,
    lock_holder,
    newest_logs,
    read_job_state,
    show_logs,
)
from bapo_megatron.commands.cluster.status import read_status, status_text
from bapo_megatron.errors import ConfigError
from tests.support.executables import executable
from tests.unit.commands.test_run_status import STATE, locked, queue


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run by a job that Slurm says is running."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "slurm.state").write_text(STATE)
    queue(monkeypatch, ("RUNNING", ""))
    return run


def test_logs_are_those_of_the_newest_start(run: Path) -> None:
    """Of the job that trains: a later one of eval.sbatch or convert.sbatch has its logs beside them."""
    for job, restart in ((9, 0), (41, 9), (41, 10), (57, 0)):
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
    (run / "slurm.state").unlink()
    assert newest_logs(run) == [run / "logs/57/0" / name for name in names]


def test_following_shows_what_is_new_and_the_next_start(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_job, "_LIST_S", 0.0)
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
    texts = ((first, "old"), (first, "new"), (second, "again"))
    assert out.getvalue() == "".join(f"==> {path.relative_to(run)} <==\n{text}\n" for path, text in texts)


def test_following_shows_each_line_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are written while it looks."""
    log, real, lines = run / "logs/41/0/job.log", Path.open, iter("abcdef")
    log.parent.mkdir(parents=True)
    log.touch()

    def grows(path: Path, *rest: Any, **more: Any) -> Any:
        if path == log:
            with real(path, "a") as file:
                file.write(f"{next(lines)}\n")
        return real(path, *rest, **more)

    monkeypatch.setattr(Path, "open", grows)
    monkeypatch.setattr(run_job.time, "sleep", lambda _s: None)
    out, looks = io.StringIO(), iter([True] * 3 + [False])
    follow_logs(run, out, is_following=lambda: next(looks))
    assert [line for line in out.getvalue().splitlines() if len(line) == 1] == list("abcd")


def test_missing_logs_and_jobs_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="writes to its terminal"):
        show_logs(tmp_path, io.StringIO())
    with pytest.raises(ConfigError, match="is not running here"):
        cancel(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        cancel(tmp_path / "no")


def test_a_job_that_could_not_be_told_to_stop_does_not_stop_at_its_next_time_limit(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*command: str) -> str:
        assert (run / "stop").exists()
        raise run_job.SlurmError(f"{command[0]}: Unable to contact slurm controller")

    monkeypatch.setattr(run_job, "call_slurm", refused)
    with pytest.raises(ConfigError, match="job 41 could not be cancelled: scancel: Unable to contact"):
        cancel(run)
    assert not (run / "stop").exists()
    queue(monkeypatch, None)  # no answer is not an empty queue
    with pytest.raises(ConfigError, match="Slurm does not answer, so job 41 of .* is not cancelled"):
        cancel(run)
    called: list[tuple[str, ...]] = []
    queue(monkeypatch, ("SIGNALING", ""))
    monkeypatch.setattr(run_job, "call_slurm", lambda *command: called.append(command))
    assert "told to save and stop" in cancel(run)
    assert called == [("scancel", "--batch", "--signal=USR1", "41")]


def test_a_lock_of_another_file_names_no_process_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bapo cancel` would end whatever holds it: a file of another disk with the lock's number."""
    run, lock = tmp_path / "run", tmp_path / "run/.lock"
    run.mkdir()
    with locked(lock):
        assert lock_holder(run) == os.getpid()
    inode, real = lock.stat().st_ino, Path.read_text

    def locks(path: Path, *rest: Any, **more: Any) -> str:
        if path != Path("/proc/locks"):
            return real(path, *rest, **more)
        return f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:2a:{inode} 0 EOF\n"

    monkeypatch.setattr(Path, "read_text", locks)
    assert lock_holder(run) is None
    with lock.open():
        assert lock_holder(run) == os.getpid()


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
    assert "not in the queue; it was submitted, and ended without a record" in read_status(tmp_path).state
    assert [path.name for path in newest_logs(tmp_path)] == ["sbatch_bapo-x_41.out"]


@pytest.mark.parametrize(
    ("job_status", "before", "job"),
    [
        ("stopped", None, "57"),
        ("running", ("RUNNING", ""), "41"),
        ("requeued", ("REQUEUE_HOLD", ""), "41"),  # `bapo cancel` must find it
        ("running", ("SUSPENDED", ""), "41"),
        ("running", ("", ""), "57"),  # scancel has ended it
        ("running", None, "41"),  # Slurm does not answer
    ],
)
def test_a_submitted_job_is_the_runs_once_the_one_before_is_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job_status: str,
    before: tuple[str, str] | None,
    job: str,
) -> None:
    queue(monkeypatch, before)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/submitted.job").write_text("57\n")
    begun = f"job=41\nstatus={job_status}\n"
    for state, wanted in ((begun, job), ("status=running\n", "57"), ("job=57\nstatus=done\n", "57")):
        (tmp_path / "slurm.state").write_text(state)
        found = read_job_state(tmp_path)
        assert found is not None
        assert found.job == wanted
    assert found.status == "done"
    assert capsys.readouterr().err.count(f"{tmp_path}/slurm.state names no job of this run") == 1


def test_a_users_defaults_of_squeue_do_not_hide_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQUEUE_STATES=RUNNING hides a job that waits: `bapo cancel` would find none in the queue."""
    executable(tmp_path / "squeue", '[ -n "$SQUEUE_STATES" ] || echo "PENDING|Priority"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    assert run_job.queue_state("41") == ("PENDING", "Priority")
