"""A file system that does not answer for a minute."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import ROOT
from tests.support.metrics import results
from tests.support.short_runs import finish, start, wait_for_steps
from tests.support.small_disk import freezable_disk, freeze

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MINUTE_S = 60.0


def test_a_minute_without_an_answer_costs_a_minute(whole: Path, tmp_path: Path) -> None:
    """Nothing ends, nothing is lost, and `bapo status` does not wait for it."""
    with freezable_disk(tmp_path / "disk", 128) as disk:
        run_dir = disk / "run"
        process = start(run_dir)
        wait_for_steps(process, run_dir, 1)
        frozen = freeze(disk, 1000)
        thaw_at = time.monotonic() + MINUTE_S
        time.sleep(5)
        before = results(run_dir)
        command = [sys.executable, "-m", "bapo_megatron.cli", "status", str(run_dir)]
        status = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert status.returncode == 0, status.stderr
        assert f"step        {len(before)} of 5" in status.stdout
        time.sleep(max(0.0, thaw_at - time.monotonic()))
        assert results(run_dir) == before, "it was not frozen"
        assert process.poll() is None
        assert frozen.stdin is not None
        frozen.stdin.close()
        assert frozen.wait(MINUTE_S) == 0
        finish(process)
        assert results(run_dir) == results(whole)
        assert results(run_dir, "updates.jsonl") == results(whole, "updates.jsonl")
        kinds = {row["kind"] for row in read_jsonl(run_dir / "events.jsonl")}
        assert not kinds & {"resume", "sampler_died", "engine_lost"}
