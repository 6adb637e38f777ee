"""``bapo doctor`` as a user runs it, on a broken machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_megatron.runtime.distributed import free_port

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/demo_cpu.py"


def doctor(*arguments: str, before: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; packages in the folder ``before`` hide those that are installed."""
    path = os.pathsep.join(map(str, filter(None, (before, ROOT))))
    return subprocess.run(
        [sys.executable, "-m", "bapo_megatron.cli", "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """A package that raises on import, a layout that does not fit, a server that is not there."""
    (tmp_path / "math_verify.py").write_text("raise RuntimeError('built for another Python')")
    url = f"http://127.0.0.1:{free_port()}"
    flags = ["--parallel.tensor=3", "--rollout.engine=sglang", "--rollout.sglang.urls", url]
    done = doctor(RECIPE, f"--run-dir={tmp_path / 'run'}", *flags, "--json", before=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    problems = [row for row in json.loads(done.stdout)["rows"] if row["state"] == "problem"]
    told = "\n".join(f"{row['section']} {row['name']}: {row['found']}" for row in problems)
    assert "training math-verify" in told
    assert "its import fails: RuntimeError: built for another Python" in told
    assert f"recipe {RECIPE}: parallel.tensor=3 does not divide" in told
    assert f"servers {url}: no answer" in told
    assert all(row["needed"] and row["fix"] for row in problems)
