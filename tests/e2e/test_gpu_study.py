"""`make gpu-study` on a CPU, end to end: the command of docs/gpu.md, with a real model and its problems."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from studies.gpu_study import __main__ as program
from tests.support.forked_commands import ROOT, forking
from tests.support.real_model import MODEL, require_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_small_study_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rewards differ within a group, the page has both arms, and the same command finds them done."""
    require_model()
    lines = (ROOT / "docs/gpu.md").read_text().splitlines()
    [documented] = [line for line in lines if line.startswith("python -m studies.gpu_study")]
    assert str(MODEL.relative_to(ROOT)) in documented
    with TemporaryDirectory(dir=tmp_path) as folder:  # of gigabytes
        command = [sys.executable, *shlex.split(documented)[1:], f"--folder={folder}"]
        first = subprocess.run(
            command, cwd=ROOT, env=forking(), capture_output=True, text=True, timeout=1800, check=False
        )
        assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
        home = Path(folder) / "small"
        for name in ("grpo", "paper"):
            updates = read_jsonl(home / "arms" / name / "updates.jsonl")
            assert len(updates) == 8  # a step at staleness 8
            assert any(row["policy/grad_norm"] > 0 for row in updates)
            steps = read_jsonl(home / "arms" / name / "metrics.jsonl")
            assert any(
                row["sampled/reward/solved_none"] + row["sampled/reward/solved_all"] < 1 for row in steps
            )
        page = (home / "gpu_study.md").read_text()
        assert "2 of 2 arms" in page
        assert "| `paper` | " in page
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", command[2:])
        with pytest.raises(SystemExit, match="^0$"):
            program.main()
    again = capsys.readouterr().out
    assert "1/2 grpo is done" in again
    assert "2/2 paper is done" in again
