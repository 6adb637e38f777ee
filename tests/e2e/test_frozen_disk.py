"""A file system that does not answer for a minute."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.e2e.test_runs import ROOT, finish, start, wait_for_steps
from tests.support.metrics import results
from tests.support.small_disk import freezable_disk, freeze

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MINUTE_S = 60.0


def test_a_minute_without_an_answer_costs_a_minute(tmp_path: Path) -> None:
    """Nothing ends, nothing is lost, and `bapo status` does not wait for it."""
    unharmed = tmp_path / "unharmed"
    finish(start(unharmed))
    with freezable_disk(tmp_path / "disk", 128) as disk:
        run_dir = disk / "run"
        process = start(run_dir)
        wait_for_steps(process, run_dir, 1)
        frozen = freeze(disk, MINUTE_S)
        time.sleep(5)
        before = results(run_dir)
        command = [sys.executable, "-m", "bapo_megatron.cli", "status", str(run_dir)]
        status = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=45)
        assert status.returncode == 0, status.stderr
        assert f"step        {len(before)} of 5" in status.stdout
        time.sleep(20)
        assert results(run_dir) == before, "it was not frozen"
        assert process.poll() is None
        assert frozen.wait(2 * MINUTE_S) == 0
        finish(process)
        assert results(run_dir) == results(unharmed)
        assert results(run_dir, "updates.jsonl") == results(unharmed, "updates.jsonl")
        kinds = {row["kind"] for row in read_jsonl(run_dir / "events.jsonl")}
        assert not kinds & {"resume", "sampler_died", "engine_lost"}
