"""The runner of a study with a stand-in for `bapo train`: order, resume, failures, and being told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError, Preempted
from bapo_megatron.runtime.jsonl_log import read_jsonl
from benchmarks.study.lives import Life
from benchmarks.study.plan import Arm
from benchmarks.study.runner import Clock, Failure, Process, log_of, run_arms

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


def arms_in(folder: Path, *names: str) -> list[Arm]:
    return [Arm("grpo", 1, 0, 3, folder / name, (name, str(folder / name))) for name in names]


def train(command: Sequence[str]) -> int:
    """A run of three steps that goes on where it was; what it does is in its name."""
    kind, run_dir = command[0], Path(command[1])
    run_dir.mkdir(exist_ok=True)
    if kind.startswith("fails"):
        print("some lines\nerror: the disk is full\n")
        return 4
    if kind.startswith("raises"):
        raise ValueError("not finite")
    if kind.startswith("idle"):
        return 0  # and has exported nothing
    steps = run_dir / "metrics.jsonl"
    for step in range(len(read_jsonl(steps)) + 1 if steps.exists() else 1, 4):
        with steps.open("a") as log:
            log.write(json.dumps({"step": step, "pid": os.getpid()}) + "\n")
        if kind.startswith("killed") and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while kind.startswith("hangs"):
            time.sleep(0.01)
    for folder in ("checkpoints/step_3", "export", "weights"):
        (run_dir / folder).mkdir(parents=True)
    (run_dir / "events.jsonl").write_text('{"kind": "export", "step": 3}\n')
    return 0


def start(arm: Arm) -> Process:
    return Life(train, arm.command, Path(log_of(arm)), threads=1)


def run(arms: list[Arm], parallel: int = 2) -> tuple[list[Failure], list[str]]:
    said: list[str] = []
    return run_arms(arms, start, parallel, said.append), said


def test_all_arms_are_run_and_told(tmp_path: Path) -> None:
    arms = arms_in(tmp_path / "arms", "a", "b", "c")
    failures, said = run(arms)
    assert failures == []
    assert all(arm.is_done() for arm in arms)
    assert said[0] == "3 arms, 0 of them done"
    assert sorted(line.split()[0] for line in said[1:]) == ["1/3", "2/3", "3/3"]
    assert "left" in said[1]
    assert "left" not in said[3]
    kept = {path.name for arm in arms for path in arm.run_dir.iterdir()}
    assert kept == {"metrics.jsonl", "events.jsonl"}, "28 arms of a real model would fill a disk"


def test_what_is_done_is_skipped(tmp_path: Path) -> None:
    arms = arms_in(tmp_path, "a", "b")
    run(arms[:1])
    before = (arms[0].run_dir / "metrics.jsonl").read_bytes()
    _, said = run(arms)
    assert said[0] == "2 arms, 1 of them done"
    assert [line.split()[1] for line in said[1:]] == ["b"]
    assert (arms[0].run_dir / "metrics.jsonl").read_bytes() == before
    assert run(arms)[1] == ["2 arms, 2 of them done"]


def test_a_killed_arm_is_told_and_goes_on(tmp_path: Path) -> None:
    [arm] = arms_in(tmp_path, "killed")
    [failure] = run([replace(arm, memory="4.5 GB")])[0]
    assert failure.reason == (
        "killed by signal 9, which is most often the kernel's out-of-memory killer "
        "(it needs 4.5 GB: fewer arms at a time, --parallel, need less)"
    )
    assert run([arm])[0] == []
    rows = read_jsonl(arm.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["pid"] == rows[1]["pid"] != rows[2]["pid"]


def test_a_failure_ends_no_other_arm(tmp_path: Path) -> None:
    arms = arms_in(tmp_path, "fails", "a", "raises", "b", "idle")
    failures, said = run(arms, parallel=1)
    reasons = {failure.arm.name: failure.reason for failure in failures}
    assert reasons == {
        "fails": "exit code 4: error: the disk is full",
        "raises": "exit code 70: ValueError: not finite",
        "idle": "exit code 0",
    }
    assert [arm.name for arm in arms if arm.is_done()] == ["a", "b"]
    assert "fails failed, exit code 4: error: the disk is full; about" in said[1]


def test_no_more_at_a_time_than_asked(tmp_path: Path) -> None:
    at_work: set[str] = set()
    most = 0

    class Slow:
        def __init__(self, name: str) -> None:
            nonlocal most
            self.name, self.left = name, 3
            at_work.add(name)
            most = max(most, len(at_work))

        def code(self) -> int | None:
            self.left -= 1
            if self.left > 0:
                return None
            at_work.discard(self.name)
            return 1

        def tell(self, number: signal.Signals) -> None: ...

    run_arms(arms_in(tmp_path, *"abcde"), lambda arm: Slow(arm.name), 2, lambda _: None)
    assert most == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_stops_its_arms(number: signal.Signals, tmp_path: Path) -> None:
    arms = arms_in(tmp_path, "hangs_a", "hangs_b", "c")
    lives: list[Life] = []

    def started(arm: Arm) -> Life:
        lives.append(Life(train, arm.command, Path(log_of(arm)), threads=1))
        return lives[-1]

    def tell() -> None:
        while len(lives) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    teller = threading.Thread(target=tell)
    teller.start()
    with pytest.raises(Preempted, match="told to stop"):
        run_arms(arms, started, 2, lambda _: None)
    teller.join()
    assert [life.code() for life in lives] == [-signal.SIGTERM, -signal.SIGTERM]
    assert not arms[2].run_dir.exists()


def test_arms_die_with_the_study(tmp_path: Path) -> None:
    """After kill -9 of the study nothing of it goes on by itself."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.unit.study.test_study_runner import *\n"
        "[arm] = arms_in(Path(sys.argv[1]), 'hangs')\n"
        "print(start(arm).pid, flush=True)\ntime.sleep(600)"
    )
    study = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert study.stdout is not None
    pid = int(study.stdout.readline())
    study.kill()
    study.wait()
    wait_for(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(event: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not event():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_is_left_by_hand() -> None:
    """100 units of work for two at a time; 20 took 60 s: 80 are left, 3 s each, by two."""
    clock = Clock(100, parallel=2)
    clock.ended(5, 20.0)
    clock.ended(15, 40.0)
    assert clock.left_s() == pytest.approx(120.0)


def test_the_command_says_what_it_wants() -> None:
    from benchmarks.study.command import study_command

    for arguments in ([], ["speed"], ["--seeds", "2"]):
        with pytest.raises(ConfigError, match="usage: bapo study staleness"):
            study_command(arguments, train)
    assert study_command(["--help"], train) == 0
