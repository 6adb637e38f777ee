"""A miniature of `bapo study staleness`: two arms, two seeds, one step; killed on its way, and continued."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.runtime.jsonl_log import read_jsonl
from benchmarks.study.controller.options import RECIPE as CONTROLLER
from benchmarks.study.options import RECIPE as STUDY
from tests.support.forked_commands import ForkedCommand, start_bapo

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ARMS = [f"{method}-4x-seed{seed}" for seed in (0, 1) for method in ("grpo", "paper")]

RECIPE = """
from dataclasses import replace
from pathlib import Path
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe


def recipe():
    run = load_recipe(Path({recipe!r}), RunConfig)
    return replace(
        run,
        rollout=replace(run.rollout, prompts_per_step=4, group_size=4, max_response_tokens=64),
        evaluation=replace(run.evaluation, suites=({suite!r},)),
    )
"""


def small_recipe(tmp_path: Path, base: Path) -> Path:
    """A study's recipe with small batches and few held-out problems."""
    suite = tmp_path / "few.jsonl"
    [problems] = load_recipe(base, RunConfig).evaluation.suites
    lines = Path(problems).read_text().splitlines(keepends=True)
    suite.write_text("".join(lines[:4]))
    recipe = tmp_path / "small.py"
    recipe.write_text(RECIPE.format(recipe=str(base), suite=str(suite)))
    return recipe


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The first study, of a small recipe."""
    recipe = small_recipe(tmp_path, STUDY)
    flags = ["--methods", "grpo", "paper", "--passes", "4", "--seeds=2", "--steps=1"]
    folder = [f"--recipe={recipe}", f"--folder={tmp_path / 'study'}"]
    return ["study", "staleness", *flags, *folder]


def wait_for(event: Callable[[], bool], process: ForkedCommand | None = None) -> None:
    deadline = time.monotonic() + 900
    while not event():
        assert process is None or process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def exported(run_dir: Path) -> bool:
    log = run_dir / "events.jsonl"
    return log.exists() and any(row["kind"] == "export" for row in read_jsonl(log))


def test_a_killed_study_goes_on_to_its_document(command: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "study"
    first = folder / "arms" / ARMS[0]
    study = start_bapo(*command)
    wait_for(lambda: exported(first), study)
    arms = psutil.Process(study.pid).children()
    os.kill(study.pid, signal.SIGKILL)
    study.wait()
    wait_for(lambda: not any(arm.is_running() and arm.status() != psutil.STATUS_ZOMBIE for arm in arms))
    before = (first / "metrics.jsonl").stat().st_mtime_ns

    output = start_bapo(*command).communicate(timeout=900)[0].decode()
    assert "4 of 4 arms" in output, output[-3000:]
    assert (first / "metrics.jsonl").stat().st_mtime_ns == before
    assert f" {ARMS[0]} done" not in output
    assert f" {ARMS[3]} done" in output
    check_arms(folder)
    text = (folder / "study.md").read_text()
    assert "4 of 4 arms are done, 2 seeds of 1 step each" in text
    assert "| 4x | `paper` | 0 of 2 |" in text
    assert "- Not judged: gate entropy kept on-policy (1x) failed: not measured" in text
    assert len(list((folder / "figures").glob("*.png"))) == 7


def check_arms(folder: Path) -> None:
    """Each has made its steps once, with its own method and seed; seeds share their first batch."""
    rewards = {}
    for name in ARMS:
        run = folder / "arms" / name
        rows = read_jsonl(run / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1]
        rewards[name] = rows[0]["reward/mean"], rows[0]["rollout/tokens"]
        config = json.loads((run / "config.json").read_text())["config"]
        assert config["seed"] == int(name[-1])
        assert config["algorithm.bounds.high_end"] == (1.2 if name.startswith("grpo") else 3.0)
        assert [row["step"] for row in read_jsonl(run / "evaluations.jsonl")] == [0, 1]
    assert rewards[ARMS[0]] == rewards[ARMS[1]] != rewards[ARMS[2]] == rewards[ARMS[3]]
    stored = json.loads((folder / "study.json").read_text())
    assert sorted(stored["arms"]) == sorted(ARMS)


def test_the_second_study_makes_its_quick_arms_once(tmp_path: Path) -> None:
    """Its page judges nothing, and the same command finds its arms done."""
    folder, recipe = tmp_path / "study", small_recipe(tmp_path, CONTROLLER)
    words = ["study", "controller", "--quick", "--steps=2", f"--recipe={recipe}", f"--folder={folder}"]
    output = start_bapo(*words).communicate(timeout=900)[0].decode()
    assert "3 of 3 known arms" in output, output[-3000:]
    page = (folder / "quick/study.md").read_text()
    assert "Not judged: this is `--quick`" in page
    stored = (folder / "quick/study.jsonl").read_text()
    head, *lines = map(json.loads, stored.splitlines())
    assert head["design"] == "controller-2"
    assert [line["arm"] for line in lines] == ["grpo-1-seed0", "grpo-8-seed0", "paper-8-seed0"]
    rows = {
        arm: read_jsonl(folder / "quick/arms" / arm / "updates.jsonl")
        for arm in ("grpo-1-seed0", "grpo-8-seed0")
    }
    assert [len(found) for found in rows.values()] == [2, 16]  # updates: the staleness of each of two steps
    again = start_bapo(*words).communicate(timeout=900)[0].decode()
    assert "0 arms, 0 of them done" in again, again
    assert (folder / "quick/study.jsonl").read_text() == stored
    analysed = start_bapo(*words, "--analyse", f"--write={tmp_path / 'page.md'}").communicate(timeout=900)[0]
    assert "3 of 3 known arms" in analysed.decode()  # out of their run directories
    assert (tmp_path / "page.jsonl").read_text() == stored


def test_the_third_study_makes_its_quick_arms(tmp_path: Path) -> None:
    """With a small policy: the pretrained model takes 25 minutes of a core for an arm."""
    recipe = small_recipe(tmp_path, CONTROLLER)
    words = ["study", "real-model", "--quick", "--steps=1", f"--recipe={recipe}", f"--folder={tmp_path}"]
    output = start_bapo(*words).communicate(timeout=900)[0].decode()
    assert "2 of 2 arms" in output, output[-3000:]
    page = (tmp_path / "quick/study.md").read_text()
    assert "| 8 | `paper` (BAPO, micro-batches) | 1 |" in page
    head, *lines = map(json.loads, (tmp_path / "quick/study.jsonl").read_text().splitlines())
    assert head["design"] == "real-model-1"
    assert [line["arm"] for line in lines] == ["grpo-1-seed0", "paper-8-seed0"]
