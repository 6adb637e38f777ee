"""Runs of the demo with a KL penalty to a frozen reference: it holds, resumes bit for bit, is refused."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import ROOT
from tests.support.metrics import results
from tests.support.once import made_once
from tests.support.short_runs import TWO, Command, audited, exported, finish, output_of, start, wait_for_steps

pytestmark = pytest.mark.e2e

STEPS = ("--steps=4", "--optimizer.warmup-updates=0")


def penalized(run_dir: Path, coefficient: float, *flags: str) -> Command:
    return start(run_dir, *STEPS, f"--algorithm.reference-kl.coefficient={coefficient}", *flags)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, with a large coefficient."""

    def make(folder: Path) -> None:
        with audited(folder / "run"):
            finish(penalized(folder / "run", 1.0))

    return made_once(tmp_path_factory, "held", make) / "run"


def distances(run_dir: Path, estimator: str) -> list[float]:
    """The estimate at the weights before each update."""
    return [row[f"reference_kl/{estimator}"] for row in read_jsonl(run_dir / "updates.jsonl")]


def test_the_penalty_keeps_the_policy_near_the_reference(held: Path, tmp_path: Path) -> None:
    """Against a run whose coefficient is too small to act, so that it only measures."""
    free = tmp_path / "free"
    finish(penalized(free, 1e-12))
    for estimator in ("k1", "k3"):
        near, far = distances(held, estimator), distances(free, estimator)
        assert near[0] == pytest.approx(0.0, abs=1e-6)  # the reference is the model that the run starts from
        assert far[0] == near[0]
        assert np.mean(far[-4:]) > 1.5 * np.mean(near[-4:]) > 0
    row = read_jsonl(held / "metrics.jsonl")[-1]
    assert row["reference_kl/penalty"] == pytest.approx(row["reference_kl/k3"], rel=1e-5)
    # Until the first update the runs are one: the journal knows nothing of the reference.
    one, other = (np.load(run / "journal/step_000001.npz", allow_pickle=False) for run in (held, free))
    assert one.files == other.files
    assert all(np.array_equal(one[name], other[name]) for name in one.files)


def test_kill_9_and_restart_end_bitwise_equal(held: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    with audited(run_dir):
        process = penalized(run_dir, 1.0)
        wait_for_steps(process, run_dir, 3)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        finish(penalized(run_dir, 1.0))
    assert [row["kind"] for row in read_jsonl(run_dir / "events.jsonl")].count("resume") == 1
    assert results(run_dir) == results(held)
    assert results(run_dir, "updates.jsonl") == results(held, "updates.jsonl")
    assert all(torch.equal(tensor, exported(held)[name]) for name, tensor in exported(run_dir).items())


@pytest.mark.slow
def test_a_penalty_in_the_reward_changes_the_advantages_alone(tmp_path: Path) -> None:
    """And another reference is refused, unless that is asked for."""
    model, run_dir = (
        shutil.copytree(ROOT / "recipes/demo/policy_rambles", tmp_path / "model"),
        tmp_path / "run",
    )
    flags = (
        *TWO,
        "--algorithm.reference-kl.estimator=k1",
        "--algorithm.reference-kl.place=reward",
        f"--algorithm.reference-kl.model={model}",
    )
    finish(penalized(run_dir, 0.05, *flags, "--steps=2"))
    rows = read_jsonl(run_dir / "updates.jsonl")
    assert all(row["reference_kl/k3"] > 0.01 for row in rows)  # the reference is another model
    first = [row["reference_kl/penalty"] * row["policy/tokens"] for row in rows if row["step"] == 1]
    assert sum(first[:2]) == pytest.approx(sum(first[2:]))  # at pi_old, in every pass over the batch

    another = f"--algorithm.reference-kl.model={ROOT / 'recipes/demo/policy'}"
    other = penalized(run_dir, 0.05, *flags[:-1], another)
    assert "algorithm.reference_kl.model: " in output_of(other)
    assert other.returncode == 2
    allowed = "--allow-change=algorithm.reference_kl.model"
    finish(penalized(run_dir, 0.05, *flags[:-1], another, "--steps=3", allowed))
    assert [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")] == [1, 2, 3]
