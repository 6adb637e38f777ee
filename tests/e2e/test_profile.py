"""``profile.steps``: a trace of the asked step and rank alone, which changes nothing that is computed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.metrics import results
from tests.support.short_runs import TWO, finish, start

pytestmark = pytest.mark.e2e

FEW = ("--steps=2", "--rollout.prompts-per-step=4", *TWO)


def test_a_step_of_a_rank_is_traced(tmp_path: Path) -> None:
    traced, plain = tmp_path / "traced", tmp_path / "plain"
    finish(start(traced, *FEW, "--profile.steps", "2", "--profile.ranks", "1", "--profile.memory"))
    [file] = (traced / "profile").iterdir()
    assert file.name == "step_000002_rank_1.trace.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::mm", "Optimizer.step#AdamW.step", "[memory]"} <= names

    finish(start(plain, *FEW))
    assert not (plain / "profile").exists()
    assert results(traced) == results(plain)
