"""``bapo train --fork``: the run continues as the other one did, at another layout, and after kills."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from bapo_megatron.commands.cluster.status import read_status, status_text
from bapo_megatron.commands.report.data import read_run
from bapo_megatron.commands.report.header import facts
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.metrics import results
from tests.support.short_runs import (
    LIMIT_S,
    TWO,
    TWO_JUDGES,
    exported,
    finish,
    output_of,
    start,
    wait_for_steps,
)

pytestmark = pytest.mark.e2e


def times(run: Path) -> dict[str, int]:
    """When each file of a run was written that training writes, and nothing else does."""
    folders = (run / "checkpoints", run / "journal")
    files = [
        *run.glob("*.json*"),
        *(path for folder in folders for path in folder.rglob("*") if path.is_file()),
    ]
    return {str(path): path.stat().st_mtime_ns for path in files}


def test_with_the_same_settings_it_equals_the_other_run_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    """Prompts of the other run's unfinished groups are among them. Nothing is written to the other run."""
    before, run_dir = times(whole), tmp_path / "forked"
    flags = (*TWO_JUDGES, f"--fork={whole}:4")
    output = finish(start(run_dir, *flags))
    assert f"{run_dir}: forked from {whole} at step 4" in output
    assert "unfinished groups are sampled again, first" in output
    assert "journal missing" not in output
    own = sum(row["policy/updates"] for row in read_jsonl(run_dir / "metrics.jsonl"))
    assert f" in 1 steps, {own:.0f} updates\n" in output  # the other run's are not among them
    for log in ("metrics.jsonl", "updates.jsonl"):
        assert results(run_dir, log) == [row for row in results(whole, log) if row["step"] > 4]
    theirs = exported(whole)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in exported(run_dir).items())
    assert times(whole) == before
    [event] = [row for row in read_jsonl(run_dir / "events.jsonl") if row["kind"] == "forked"]
    assert (event["run"], event["step"], event["fields"]) == (str(whole), 4, {})
    assert f"forked from  {whole} at step 4\n" in status_text(read_status(run_dir))
    told = dict(facts(read_run(run_dir)))
    assert told["forked from"] == f"{whole} at step 4"
    assert read_run(run_dir).step_numbers.tolist() == [5.0]
    assert "already" not in finish(start(run_dir, *flags))  # as a queued job does: nothing is left


@pytest.mark.slow
def test_of_a_run_that_trains_killed_and_at_another_layout(whole: Path, tmp_path: Path) -> None:
    """The other run keeps one checkpoint, continues undisturbed, and is deleted; the fork needs it no
    more."""
    parent, child, other = (tmp_path / name for name in ("parent", "child", "other"))
    training = start(parent, "--checkpoint.every=1", "--checkpoint.keep-last=1")
    wait_for_steps(training, parent, 3)
    flags = (f"--fork={parent}", "--steps=7", "--checkpoint.every=1")
    killed = start(child, *flags)
    deadline = time.monotonic() + LIMIT_S
    while not list((child / "checkpoints").glob("*step_*")):  # half-made, or made
        assert killed.poll() is None, output_of(killed)[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(killed.pid, signal.SIGKILL)
    output_of(killed)
    finish(training)
    assert results(parent) == results(whole)
    finish(start(child, *flags))
    [first, *_] = steps = [row["step"] for row in results(child)]
    assert steps == list(range(first, 8))
    shared = [row for row in results(parent) if row["step"] >= first]
    assert results(child)[: len(shared)] == shared
    shutil.rmtree(parent)
    finish(start(child, "--steps=8"))

    changed = ("--optimizer.lr=1e-4", "--algorithm.bounds.target=0.5", "--rollout.group-size=3")
    finish(start(other, *TWO, *changed, f"--fork={child}:8", "--steps=9"))
    told = str(read_status(other).forked)
    assert told.startswith(f"{child} at step 8, which was forked from {parent} at step {first - 1}; here ")
    for text in ("optimizer.lr 0.0001 (there 0.0002)", "parallel.data 2 (there unset)"):
        assert text in told
    rows = results(other)
    assert [row["step"] for row in rows] == [9]
    assert rows[0]["policy/lr"] == pytest.approx(1e-4)
