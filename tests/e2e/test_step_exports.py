"""Exports of a run's checkpoints beside its training, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.written_folders import MARK
from checkpoints_tools import verify
from tests.support.short_runs import finish, start

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_a_run_exports_its_checkpoints_and_a_continued_one_what_is_missing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ["--steps=4", "--checkpoint.keep-last=1", "--checkpoint.export-every=2"]
    finish(start(run_dir, *flags))
    assert sorted(path.name for path in (run_dir / "exports").iterdir()) == ["step_000002", "step_000004"]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000004"]
    last = run_dir / "exports/step_000004"
    assert verify(last, run_dir / "export").equal  # what the policy itself says of its weights
    assert not verify(run_dir / "exports/step_000002", last).equal
    for path in last.iterdir():
        if path.suffix != ".safetensors" and path.name != MARK:
            assert path.read_bytes() == (run_dir / "export" / path.name).read_bytes()
    mark, of_run = (json.loads((folder / MARK).read_text()) for folder in (last, run_dir / "export"))
    assert (mark.pop("written_by"), of_run.pop("written_by")) == ("bapo-ckpt", "bapo")
    assert mark == of_run

    last.rename(run_dir / "moved")
    finish(start(run_dir, *flags))
    assert verify(last, run_dir / "moved").equal
    done = [row["step"] for row in read_jsonl(run_dir / "events.jsonl") if row["kind"] == "export_done"]
    assert done == [2, 4, 4]
