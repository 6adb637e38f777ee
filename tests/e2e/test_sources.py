"""A run on two sources with two rewards: refused with others, and at other layouts.

Killed and continued: test_environment.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bapo_megatron.commands.report.page import write_report
from tests.support.forked_commands import ROOT
from tests.support.metrics import known, results
from tests.support.short_runs import finish, output_of, start

pytestmark = pytest.mark.e2e

FLAGS = ("--steps=2", "--checkpoint.every=1")
OWN = "tests.support.reward_functions:shorter"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of the demo's problems: long.jsonl with 200 of them, short.jsonl with 7."""
    folder = tmp_path_factory.mktemp("sources")
    lines = (ROOT / "recipes/demo/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "long.jsonl").write_text("".join(lines[:200]))
    (folder / "short.jsonl").write_text("".join(lines[200:207]))
    return folder


def named(folder: Path) -> str:
    sources = [
        {"path": str(folder / "long.jsonl"), "weight": 2, "reward": "math"},
        {"path": str(folder / "short.jsonl"), "reward": OWN},
    ]
    return f"--data.sources={json.dumps(sources)}"


@pytest.fixture(scope="module")
def mixed(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("mixed") / "run"
    finish(start(run_dir, named(files), *FLAGS))
    return run_dir


def test_both_are_trained_on_by_their_own_rewards(mixed: Path) -> None:
    rows = results(mixed)
    assert sum(row["source/long/rollout/groups_sampled"] for row in rows) > 0
    assert sum(row["source/short/rollout/groups"] for row in rows) > 0
    assert not any(row["reward/failures"] for row in rows)
    # Half of a score by length is never that of a right or wrong answer.
    assert all(row["source/short/reward/mean"] not in (0.0, 1.0) for row in rows)
    for row in rows:
        scored = sum(row[f"source/{name}/rollout/tokens"] for name in ("long", "short"))
        assert scored == row["rollout/tokens"]
    for row in results(mixed, "updates.jsonl"):
        tokens = sum(row[f"source/{name}/policy/tokens"] for name in ("long", "short"))
        assert tokens == row["policy/tokens"]
    page = write_report([mixed]).read_text()
    assert "source/<wbr>short/<wbr>reward/<wbr>mean" in page
    assert "tests.support.reward_functions:shorter" in page


def test_an_exchanged_file_is_refused(mixed: Path, files: Path, tmp_path: Path) -> None:
    """Also where other sources are allowed: the journal knows the digest of each file."""
    run_dir, changed = tmp_path / "run", tmp_path / "changed"
    shutil.copytree(mixed, run_dir)
    shutil.copytree(files, changed)
    lines = (changed / "short.jsonl").read_text().splitlines(keepends=True)
    (changed / "short.jsonl").write_text("".join(reversed(lines)))
    refused = start(run_dir, named(changed), "--steps=4", "--allow-change=data.sources")
    assert "data.sources[short].sha256=" in output_of(refused)
    assert refused.returncode == 2


@pytest.mark.slow
def test_layouts_agree_about_every_source(mixed: Path, files: Path, tmp_path: Path) -> None:
    """On the same rollouts, by DP 2, CP 2 and TP 2: the sums of one step."""
    whole = [row for row in results(mixed, "updates.jsonl") if row["step"] == 1]
    for layout in ("data", "context", "tensor"):
        run_dir = tmp_path / layout
        replay = ("--steps=1", f"--rollout.replay={mixed}")
        finish(start(run_dir, named(files), f"--parallel.{layout}=2", *replay))
        for ours, theirs in zip(results(run_dir, "updates.jsonl"), whole, strict=True):
            by_source = {name for name in theirs if name.startswith("source/")}
            ours, theirs = ({n: v for n, v in known(row).items() if n in by_source} for row in (ours, theirs))
            assert ours == pytest.approx(theirs, rel=5e-3, abs=1e-4), layout
            assert theirs
