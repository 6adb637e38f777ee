"""`make gpu-study`, end to end at the policy of the first study on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from benchmarks.gpu_study import __main__ as program
from tests.support.forked_commands import ROOT, forking

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEMO = ROOT / "recipes/demo"


def test_two_arms_of_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They learn something, their page has both, and the same command finds them done."""
    folder, held_out = tmp_path / "study", tmp_path / "held_out.jsonl"
    held_out.write_text("".join((DEMO / "eval_study.jsonl").read_text().splitlines(True)[:3]))
    command = [
        *(sys.executable, "-m", "benchmarks.gpu_study", f"--model={DEMO / 'policy_study'}", "--small"),
        *("--steps=1", f"--train={DEMO / 'train_study.jsonl'}", f"--held-out={held_out}"),
        *("--reward=tests.support.real_model:letters", f"--folder={folder}", "--arms", "grpo", "paper"),
    ]
    first = subprocess.run(
        command, cwd=ROOT, env=forking(), capture_output=True, text=True, timeout=1800, check=False
    )
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    for name in ("grpo", "paper"):
        updates = read_jsonl(folder / "arms" / name / "updates.jsonl")
        assert len(updates) == 8  # a step at staleness 8
        assert any(row["policy/grad_norm"] > 0 for row in updates)
    page = (folder / "gpu_study.md").read_text()
    assert "2 of 2 arms" in page
    assert "| `paper` | " in page
    monkeypatch.setattr(sys, "argv", command[2:])
    with pytest.raises(SystemExit, match="^0$"):
        program.main()
    again = capsys.readouterr().out
    assert "1/2 grpo is done" in again
    assert "2/2 paper is done" in again
