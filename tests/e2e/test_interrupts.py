"""Runs that are told to stop, changed, hung, and killed many times."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import ROOT
from tests.support.metrics import results
from tests.support.once import made_once
from tests.support.processes import ranks_of, sampler_of
from tests.support.short_runs import (
    LIMIT_S,
    TWO,
    Command,
    check_like,
    exported,
    finish,
    output_of,
    start,
    wait_for_steps,
)
from tests.support.tiers import slow_but

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_saves_within_a_step_and_the_run_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path, number: signal.Signals
) -> None:
    """To the command alone, as srun sends it: its processes must hear of it. tests/slurm sends SIGTERM."""
    run_dir = tmp_path / "told"
    process = start(run_dir, *TWO)
    wait_for_steps(process, run_dir, 3)
    os.kill(process.pid, number)
    output = output_of(process)
    assert process.returncode == 85, output[-3000:]
    if number != signal.SIGHUP:  # after which output goes nowhere: its terminal is gone
        assert f"stopped: told to stop by {number.name}; saved after step" in output
    assert "Traceback" not in output
    names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert all(re.fullmatch(r"step_\d{6}(_update_\d{3})?", name) for name in names)
    if number == signal.SIGHUP:  # what it has saved, it has as after the others
        assert names
        return
    alone: Path = request.getfixturevalue("alone")
    finish(start(run_dir, *TWO))
    for log in ("metrics.jsonl", "updates.jsonl"):
        assert results(run_dir, log) == results(alone, log)
    ours, theirs = exported(run_dir), exported(alone)
    assert all((tensor == theirs[name]).all() for name, tensor in ours.items())


def test_a_signal_before_the_first_step_is_no_failure(tmp_path: Path) -> None:
    """Sent as soon as the command has made its directory: it is still starting."""
    run_dir = tmp_path / "early"
    process = start(run_dir, *TWO)
    while not run_dir.exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    output = output_of(process)
    assert process.returncode == 85, output[-3000:]
    assert "stopped: told to stop by SIGTERM" in output
    assert "Traceback" not in output
    assert not list(run_dir.glob("checkpoints/step_*"))


PHASES: dict[str, Callable[[Path, Command], bool]] = {
    "the command has begun": lambda _run, _process: True,
    "its directory is there": lambda run_dir, _process: run_dir.exists(),
    "its sampler starts": lambda _run, process: sampler_of(process.pid) is not None,
}


@pytest.mark.parametrize("phase", slow_but(list(PHASES), "its sampler starts"))
def test_a_start_that_is_told_to_stop_ends_at_once(tmp_path: Path, phase: str) -> None:
    """Every process is told, as by Slurm; at once: it does not start what was told to stop once more."""
    run_dir = tmp_path / "starting"
    process = start(run_dir, launcher=(sys.executable,))
    deadline = time.monotonic() + LIMIT_S
    while not PHASES[phase](run_dir, process):
        assert process.poll() is None, output_of(process)
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    output = output_of(process)
    if phase == "the command has begun" and process.returncode == -signal.SIGTERM:
        return  # before its first line: task.sh makes 85 of it
    assert process.returncode == 85, output[-3000:]
    assert "stopped: told to stop by SIGTERM before the run began" in output
    assert "restarting it" not in output
    assert not list(run_dir.glob("checkpoints/step_*"))
    events = run_dir / "events.jsonl"
    kinds = [row["kind"] for row in read_jsonl(events)] if events.exists() else []
    assert "start" not in kinds or kinds[-1] == "preempted"


def test_a_job_near_its_end_makes_no_update_that_it_could_not_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")  # long ago
    process = start(tmp_path / "late", *TWO)
    output = output_of(process)
    assert process.returncode == 85
    assert "the job's time would end before the next update is saved" in output
    assert not (tmp_path / "late/checkpoints").exists()


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes(whole: Path, tmp_path: Path) -> None:
    """One, then two, then four, on the same rollouts: to tolerance what one made of them."""
    run_dir, replay = tmp_path / "moved", f"--rollout.replay={whole}"
    finish(start(run_dir, replay, "--steps=2"))
    finish(start(run_dir, replay, "--steps=4", "--parallel.tensor=2"))
    finish(start(run_dir, replay, "--parallel.pipeline=2", "--parallel.data=2"))
    check_like(run_dir, whole)
    resumed = [row for row in read_jsonl(run_dir / "events.jsonl") if row["kind"] == "resume"]
    assert [(row["step"], row["processes"]) for row in resumed] == [(3, 2), (5, 4)]


@pytest.fixture
def two_steps(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A run of two steps, and a checkpoint, of the test's own."""
    make = lambda folder: finish(start(folder / "run", "--steps=2"))  # noqa: E731
    made = made_once(tmp_path_factory, "two-steps", make) / "run"
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.mark.slow
def test_another_recipe_is_refused_and_allowed_when_named(two_steps: Path) -> None:
    run_dir, other = two_steps, ("--steps=3", "--optimizer.lr=1e-5")
    process = start(run_dir, *other)
    output = output_of(process)
    assert process.returncode == 2
    assert "optimizer.lr: 0.0002 in the run, 1e-05 now" in output
    assert "--allow-change optimizer.lr" in output
    finish(start(run_dir, *other, "--allow-change", "optimizer.lr"))
    rows = read_jsonl(run_dir / "updates.jsonl")
    rates = {step: max(row["policy/lr"] for row in rows if row["step"] == step) for step in (2, 3)}
    assert rates[2] > 1e-5
    assert rates[3] <= 1e-5
    events = read_jsonl(run_dir / "events.jsonl")
    [changed] = [row for row in events if row["kind"] == "config_changed"]
    assert changed["fields"]["optimizer.lr"] == 1e-5


@pytest.mark.slow
def test_a_state_that_fails_the_resume_check_is_not_trained_on(two_steps: Path) -> None:
    """Certificates are measured anew: here the stored ones are what is wrong."""
    run_dir = two_steps
    [newest] = sorted((run_dir / "checkpoints").glob("step_*"))[-1:]
    trainer = json.loads((newest / "trainer.json").read_text())
    trainer["certificate"]["canary"]["log_probs"][0] += 1.0
    trainer["certificate"]["state"]["exp_avg"] = ["0123456789abcdef"]
    (newest / "trainer.json").write_text(json.dumps(trainer))
    _sign(newest, "trainer.json")
    process = start(run_dir, "--steps=3")
    output = output_of(process)
    assert process.returncode == 2
    assert "the loaded state differs from the saved state" in output
    assert "log-probs of the canary" in output
    assert "bits of the optimizer: exp_avg 0123456789abcdef in the checkpoint" in output
    assert "learning rate" not in output
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == 2
    names = [f"{newest.name}:optimizer", f"{newest.name}:canary"]
    assert f"--accept-resume-mismatch {' '.join(names)}" in output
    finish(start(run_dir, "--steps=3", "--accept-resume-mismatch", *names))
    events = read_jsonl(run_dir / "events.jsonl")
    [accepted] = [row for row in events if row["kind"] == "resume_mismatch_accepted"]
    assert accepted["checkpoint"] == newest.name
    assert sorted(accepted["differences"]) == ["canary", "optimizer"]


def _sign(checkpoint: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed."""
    from bapo_megatron.checkpoint.store import digest

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = digest(checkpoint / name)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
def test_a_run_that_hangs_prints_its_stacks_and_ends(tmp_path: Path) -> None:
    """One rank is stopped: the other waits for it in a collective, and its watchdog ends it."""
    run_dir = tmp_path / "hung"
    process = start(run_dir, *TWO, "--hang-minutes=0.15")
    wait_for_steps(process, run_dir, 1)
    _, second = ranks_of(process.pid)
    second.suspend()
    output = output_of(process)
    assert process.returncode == 1, output[-2000:]
    assert "Timeout (0:00:09)!" in output
    assert "bapo_megatron/train.py" in output  # where it hung


@pytest.mark.slow
def test_three_kills_end_in_the_same_bits() -> None:
    command = [sys.executable, "-m", "tests.support.campaign", "--kills", "3", "--seed", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "lost: 0. Results equal bit for bit." in done.stdout
