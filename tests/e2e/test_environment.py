"""A run with an environment: killed in the middle of its episodes it ends as the run that was not.

By a real server: test_chaos.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo_megatron.commands.report.page import write_report
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import ROOT
from tests.support.metrics import results
from tests.support.raw_journal import RawRecord, read_log
from tests.support.short_runs import LIMIT_S, audited, exported, finish, output_of, start

pytestmark = pytest.mark.e2e

SHORTER = "tests.support.reward_functions:shorter"


def records(run_dir: Path) -> list[RawRecord]:
    paths = sorted((run_dir / "journal").glob("segments-*.log"))
    return [record for path in paths for record in read_log(path)]


def answered(run_dir: Path, from_group: int) -> int:
    parts = [part for one in records(run_dir) if one.kind == "given" for part in one.fields["parts"]]
    return len({(part[0], part[3]) for part in parts if part[0] >= from_group})


def killed_in_its_second_round(run_dir: Path, flags: tuple[str, ...], hold: Path, answers: int) -> None:
    """A run that is killed when so many answers of the second round are on disk, and continued.

    The environments of others work then: they wait for the file ``hold`` to go.
    """
    hold.touch()
    with audited(run_dir):
        process = start(run_dir, *flags)
        deadline = time.monotonic() + LIMIT_S
        while answered(run_dir, 6) < answers:
            assert process.poll() is None, process.communicate()[0].decode()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        hold.unlink()
        finish(start(run_dir, *flags))


def assert_same_bits(ours: Path, theirs: Path) -> None:
    for step in (1, 2, 3):
        one, other = (np.load(run / f"journal/step_{step:06d}.npz") for run in (ours, theirs))
        assert sorted(one.files) == sorted(other.files)
        assert all(np.array_equal(one[name], other[name]) for name in one.files if name != "header")
        assert 0.1 < (~one["loss_masks"]).mean() < 0.9
    assert results(ours) == results(theirs)
    assert results(ours, "updates.jsonl") == results(theirs, "updates.jsonl")
    assert all(torch.equal(tensor, exported(theirs)[name]) for name, tensor in exported(ours).items())


def test_a_kill_with_two_sources_of_which_one_has_an_environment(tmp_path: Path) -> None:
    """Killed while episodes of one source wait, beside complete responses of the other, which has a reward
    of its own."""
    lines = (ROOT / "recipes/demo/train.jsonl").read_text().splitlines(keepends=True)
    hold, whole, killed = tmp_path / "hold", tmp_path / "whole", tmp_path / "killed"
    twice = {"function": "tests.support.environments:Twice", "settings": {"hold": str(hold)}, "max_turns": 3}
    sources = []
    for name, own in (("asked", {"environment": twice}), ("plain", {"reward": SHORTER})):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:60] if name == "asked" else lines[60:120]))
        sources.append({"path": str(tmp_path / f"{name}.jsonl"), "reward": "math", **own})
    flags = ("--steps=3", "--rollout.max-response-tokens=160", f"--data.sources={json.dumps(sources)}")
    finish(start(whole, *flags))
    killed_in_its_second_round(killed, flags, hold, 2)
    assert_same_bits(killed, whole)
    for row in read_jsonl(whole / "metrics.jsonl"):
        assert row["environment/turns_mean"] == row["source/asked/environment/turns_mean"] == 2.0
        assert "source/plain/environment/turns_mean" not in row
        assert row["rollout/engine_gap_max"] < 1e-3, "given tokens have no log-prob"
    page = write_report([whole]).read_text()
    assert "source/<wbr>asked/<wbr>environment/<wbr>turns_mean" in page
    assert "tests.support.environments:Twice" in page


def test_a_mistake_ends_before_any_work(tmp_path: Path) -> None:
    """Found by a worker of environments. (The others: tests/unit/config/test_environment_config.py.)"""
    process = start(tmp_path / "run", "--environment.function=tests.support.environments:Async")
    assert "stops has '</call>', which is 7 tokens" in output_of(process)
    assert process.returncode == 2
    assert not (tmp_path / "run/journal").exists()
