"""``--rollout-only`` and ``--train-only``: one half of the demo's run without the other."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.rollout.sampler.step_batches import read_step
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.types import StepBatch
from tests.support.metrics import results
from tests.support.once import made_once
from tests.support.processes import sampler_of
from tests.support.short_runs import LIMIT_S, Command, audited, finish, output_of, start

pytestmark = pytest.mark.e2e

SELDOM = "--checkpoint.every=20"  # steps take a tenth of a second, and the audit must see every log
NO_POLICY = "--parallel.tensor=64"  # of heads that cannot be split so: no policy could be built


def sample(run_dir: Path, *flags: str) -> Command:
    return start(run_dir, "--rollout-only", *flags)


def wait_for_rows(process: Command, run_dir: Path, rows: int) -> None:
    """Until the metrics of so many steps are on disk."""
    log, deadline = run_dir / "metrics.jsonl", time.monotonic() + LIMIT_S
    while not log.exists() or log.read_bytes().count(b"\n") < rows:
        assert process.poll() is None, process.communicate()[0].decode()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def batches(run_dir: Path, *steps: int) -> list[StepBatch]:
    return [read_step(run_dir / "journal", step) for step in steps]


def assert_same_groups(ours: StepBatch, theirs: StepBatch, rounding: float = 0.0) -> None:
    """``rounding``: how far log-probs may be from each other."""
    assert len(ours.groups) == len(theirs.groups) > 0
    for our_group, their_group in zip(ours.groups, theirs.groups, strict=True):
        assert our_group.prompt.prompt_id == their_group.prompt.prompt_id
        for one, other in zip(our_group.rollouts, their_group.rollouts, strict=True):
            assert (one.reward, one.finish_reason) == (other.reward, other.finish_reason)
            for name in ("token_ids_R", "versions_R"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            np.testing.assert_allclose(one.log_probs_R, other.log_probs_R, rtol=0, atol=rounding)


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, sampled without a trainer, and what the command said. All files stay."""

    def make(folder: Path) -> None:
        with audited(folder / "run"):
            output = finish(sample(folder / "run", "--steps=3", "--rollout.keep-steps=0", NO_POLICY))
        (folder / "run/output").write_text(output)

    return made_once(tmp_path_factory, "sampled", make) / "run"


def test_the_first_batch_is_that_of_the_training_run(sampled: Path, whole: Path) -> None:
    assert_same_groups(*batches(sampled, 1), *batches(whole, 1))
    [later] = batches(whole, 2)  # the training run has other weights by then
    versions = {
        int(version) for group in later.groups for one in group.rollouts for version in one.versions_R
    }
    assert versions
    assert 0 not in versions


def test_all_steps_have_the_weights_of_version_0_and_their_own_prompts(sampled: Path) -> None:
    seen: set[int] = set()
    for batch in batches(sampled, 1, 2, 3):
        assert len(batch.groups) == 6
        assert batch.metrics["rollout/groups_stale"] == 0
        for group in batch.groups:
            assert not any(rollout.versions_R.any() for rollout in group.rollouts)
        prompts = {group.prompt.prompt_id for group in batch.groups}
        assert not seen & prompts
        seen |= prompts


def test_a_rollout_only_run_has_a_report_and_no_checkpoint(sampled: Path) -> None:
    output = (sampled / "output").read_text()
    rows = read_jsonl(sampled / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        line = next(line for line in output.splitlines() if line.startswith(f"step {row['step']}/3"))
        assert f"reward {row['sampled/reward/mean']:.3f}" in line
        assert f"right {row['sampled/reward/correct_fraction']:.1%}" in line
        assert row["rollout/groups_uniform"] == row["rollout/groups_dropped"]
        assert row["time/tokens_per_s"] > 0
    assert "3 steps" in output
    assert f"responses: {sampled}/journal" in output
    assert f"--train-only {sampled}" in output
    kinds = [row["kind"] for row in read_jsonl(sampled / "events.jsonl")]
    assert kinds == ["start", "engine_ready", "done"]
    names = {path.name for path in sampled.iterdir()}
    assert not names & {"checkpoints", "weights", "export", "evaluation"}


def test_training_on_it_is_a_replay(sampled: Path, tmp_path: Path) -> None:
    """Of as many steps as there are; no engine is started."""
    run_dir = tmp_path / "trained"
    output = finish(start(run_dir, "--train-only", str(sampled)))
    assert f"{sampled} holds the rollouts of 3 steps: steps=3 instead of 5" in output
    updates = results(run_dir, "updates.jsonl")
    assert len(updates) == 3 * 4
    for name in ("policy/loss", "policy/grad_norm", "policy/kl", "policy/entropy"):
        assert all(math.isfinite(row[name] or 0.0) and row[name] is not None for row in updates)
    assert updates[0]["rollout/engine_gap_mean"] < 1e-4  # version 0 is what the policy begins with
    assert "engine_ready" not in {row["kind"] for row in read_jsonl(run_dir / "events.jsonl")}
    assert not (run_dir / "journal").exists()
    assert json.loads((run_dir / "config.json").read_text())["config"]["rollout.replay"] == str(sampled)


def test_a_rollout_only_run_resumes_where_it_was_stopped(sampled: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    with audited(run_dir):
        process = sample(run_dir, "--steps=300", SELDOM)
        wait_for_rows(process, run_dir, 1)
        os.killpg(process.pid, signal.SIGTERM)
        output = output_of(process)
        assert process.returncode == 85, output[-3000:]
        assert "the same command continues the run" in output
        assert "Traceback" not in output
        done = len(read_jsonl(run_dir / "metrics.jsonl"))
        steps = max(3, done + 1)
        assert f"resume at step {done + 1} of {steps}" in finish(sample(run_dir, f"--steps={steps}", SELDOM))
    assert [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")] == [*range(1, steps + 1)]
    for ours, theirs in zip(batches(run_dir, 1, 2, 3), batches(sampled, 1, 2, 3), strict=True):
        assert_same_groups(ours, theirs)
    before = (run_dir / "metrics.jsonl").read_bytes()
    output = finish(sample(run_dir, f"--steps={steps}"))  # nothing is left to do
    assert f"{steps} steps" in output
    assert "engine ready" not in output
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_kills_of_everything_and_of_the_sampler_cost_nothing(sampled: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    process = sample(run_dir, "--steps=300")
    wait_for_rows(process, run_dir, 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    process = sample(run_dir, "--steps=300")
    wait_for_rows(process, run_dir, 1 + len(read_jsonl(run_dir / "metrics.jsonl")))
    sampler = sampler_of(process.pid)
    assert sampler is not None
    sampler.kill()
    wait_for_rows(process, run_dir, 3 + len(read_jsonl(run_dir / "metrics.jsonl")))
    os.killpg(process.pid, signal.SIGINT)
    output = output_of(process)
    assert "the sampler's process has ended (killed by SIGKILL" in output
    assert "the same command continues after the steps that are sampled" in output
    assert process.returncode == 130
    for ours, theirs in zip(batches(run_dir, 1, 2, 3), batches(sampled, 1, 2, 3), strict=True):
        assert_same_groups(ours, theirs)


@pytest.mark.slow
def test_partial_rollouts_are_finished_at_the_same_weights(tmp_path: Path) -> None:
    """Each step grants a response its budget anew, and none gets too old."""
    run_dir = tmp_path / "partial"
    with audited(run_dir):
        finish(sample(run_dir, "--steps=3", "--rollout.max-staleness=2", "--rollout.budget-tokens=24"))
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert all(row["rollout/groups_stale"] == 0 for row in rows)
    assert sum(row["rollout/groups"] for row in rows) > 0
    lengths = [
        len(rollout.token_ids_R)
        for batch in batches(run_dir, 1, 2, 3)
        for group in batch.groups
        for rollout in group.rollouts
    ]
    assert max(lengths) > 24


@pytest.mark.slow
def test_other_processes_of_a_launcher_wait_for_rank_0(
    sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with the variables of torchrun, which test_runs.py starts."""
    run_dir = tmp_path / "launched"
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**places, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    processes = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        processes.append(sample(run_dir, "--steps=2"))
    first, second = (finish(process) for process in processes)
    assert first.count("step 1/2") == first.count("\n2 steps") == 1
    assert "step" not in second
    for ours, theirs in zip(batches(run_dir, 1, 2), batches(sampled, 1, 2), strict=True):
        assert_same_groups(ours, theirs, rounding=1e-5)  # the engine has the threads of both processes
