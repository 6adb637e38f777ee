"""Whole runs of the command line, shortened: continue after kill -9, other layouts, the export."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bapo_megatron.checkpoint.run_directory import read_config
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.forked_commands import ROOT
from tests.support.metrics import results
from tests.support.processes import sampler_of
from tests.support.short_runs import (
    TWO_JUDGES,
    audited,
    check_like,
    exported,
    finish,
    output_of,
    start,
    wait_for_steps,
)
from tests.support.small_disk import fill, small_disk

pytestmark = pytest.mark.e2e

REQUIRED = {
    "step",
    "reward/mean",
    "policy/entropy",
    "policy/grad_norm",
    "policy/kl",
    "bapo/clip_low",
    "bapo/clip_high",
    "bapo/contribution",
    "rollout/length_mean",
    "staleness/mean",
    "time/step_s",
    "time/tokens_per_s",
}


def test_the_bounds_move(whole: Path) -> None:
    """Or the comparisons below would compare constants."""
    bounds = {(row["bapo/clip_low"], row["bapo/clip_high"]) for row in read_jsonl(whole / "updates.jsonl")}
    assert len(bounds) >= 3
    assert any(0.6 < low < 0.9 or 1.2 < high < 3.0 for low, high in bounds)


def test_the_record_is_complete(whole: Path) -> None:
    rows = read_jsonl(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row.keys() >= REQUIRED for row in rows)
    updates = read_jsonl(whole / "updates.jsonl")
    versions = [row["version"] for row in updates]
    assert versions == list(range(1, len(updates) + 1))
    assert max(row["staleness/mean"] for row in updates) >= 1  # the demo reuses its samples
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step_000004", "step_000005"]
    assert list((whole / "tensorboard").glob("events.*"))
    kinds = [row["kind"] for row in read_jsonl(whole / "events.jsonl")]
    saves = ["saving", "checkpoint"] * 3
    assert kinds == ["start", "engine_ready", *saves, "export", "done"]


LONG_PACKS = (
    *("--steps=2", "--checkpoint.every=1", "--rollout.prompts-per-step=6", "--rollout.group-size=12"),
    *("--algorithm.reuse-epochs=1", "--algorithm.updates-per-epoch=1"),
)
"""Packs of thousands of tokens, whose products two threads add in another order than one."""


@pytest.mark.slow
def test_a_run_keeps_its_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued under another OMP_NUM_THREADS it equals the run that was not; another number is refused.

    Whether another number changes the last bits is a matter of the processor: MKL's products on some do not.
    """
    whole, kept = tmp_path / "whole", tmp_path / "kept"
    finish(start(whole, *LONG_PACKS))
    shutil.copytree(whole, kept)
    shutil.rmtree(kept / "checkpoints/step_000002")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    output = finish(start(kept, *LONG_PACKS, launcher=(sys.executable,)))
    assert "1 threads a rank, as when the run began, and not 2" in output
    [event] = [row for row in read_jsonl(kept / "events.jsonl") if row["kind"] == "threads_kept"]
    assert (event["threads"], event["environment"]) == (1, 2)
    assert results(kept, "updates.jsonl") == results(whole, "updates.jsonl")
    assert all(torch.equal(tensor, exported(whole)[name]) for name, tensor in exported(kept).items())

    refused = start(kept, *LONG_PACKS, "--threads=2")
    assert "threads: 1 in the run, 2 now" in output_of(refused)
    assert refused.returncode == 2


def test_kill_9_and_restart_end_bitwise_equal(whole: Path, tmp_path: Path) -> None:
    """Both have two reward workers: what is journalled or packed as scores come would differ here."""
    run_dir = tmp_path / "killed"
    with audited(run_dir):
        process = start(run_dir, *TWO_JUDGES)
        wait_for_steps(process, run_dir, 3)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        finish(start(run_dir, *TWO_JUDGES))
    assert results(run_dir) == results(whole)
    assert results(run_dir, "updates.jsonl") == results(whole, "updates.jsonl")
    for one in (run_dir, whole):
        assert read_config(one)["reward.workers"] == 2
    ours, theirs = exported(run_dir), exported(whole)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    kinds = [row["kind"] for row in read_jsonl(run_dir / "events.jsonl")]
    assert kinds.count("resume") == 1


@pytest.mark.slow
def test_kill_9_of_the_sampler_costs_nothing(whole: Path, tmp_path: Path) -> None:
    """At whatever it was doing: the next one continues from the journal, to the same bits. (Many times:
    tests/support/campaign.py.)"""
    run_dir = tmp_path / "sampler"
    with audited(run_dir):
        process = start(run_dir, "--steps=3")
        wait_for_steps(process, run_dir, 1)
        sampler = sampler_of(process.pid)
        assert sampler is not None
        sampler.kill()
        output = finish(process)
    assert output.count("the sampler's process has ended (killed by SIGKILL") == 1
    assert results(run_dir) == results(whole)[:3]
    kinds = [row["kind"] for row in read_jsonl(run_dir / "events.jsonl")]
    assert kinds.count("sampler_died") == 1


@pytest.mark.slow
def test_a_run_that_is_evaluated_computes_the_same(whole: Path, tmp_path: Path) -> None:
    """Killed behind its second evaluation, and continued. The best of the evaluated checkpoints stays."""
    run_dir, suite = tmp_path / "evaluated", tmp_path / "sums.jsonl"
    suite.write_text("".join((ROOT / "recipes/demo/eval.jsonl").read_text().splitlines(keepends=True)[:10]))
    flags = (f"--evaluation.suites={suite}", "--evaluation.every=2", "--evaluation.samples=3")
    kept = ("--checkpoint.keep-last=1", "--checkpoint.keep-best=1")
    process = start(run_dir, *flags, *kept)
    while not (run_dir / "evaluation/step_000002.jsonl").exists():
        assert process.poll() is None, process.communicate()[0].decode()[-3000:]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finish(start(run_dir, *flags, *kept))
    for log in ("metrics.jsonl", "updates.jsonl"):
        assert results(run_dir, log) == results(whole, log)
    rows = read_jsonl(run_dir / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4, 5]
    assert all(row["eval/sums/problems"] == 10 for row in rows)
    assert all(row["eval/mean"] == pytest.approx(row["eval/sums/avg@3"]) for row in rows)
    assert max(row["eval/mean"] for row in rows) > 0
    for row in rows:
        responses = read_jsonl(run_dir / f"evaluation/step_{row['step']:06d}.jsonl")
        assert sum(one["correct"] for one in responses) / 30 == pytest.approx(row["eval/mean"])
    _, second, fourth, _ = rows  # of the last step no checkpoint is left to be deleted
    best = 4 if fourth["eval/mean"] >= second["eval/mean"] else 2
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {f"step_{best:06d}", "step_000005"}


def files_of(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file of a run."""
    found = {path: path.stat() for path in run_dir.rglob("*") if path.is_file()}
    return {str(path): (about.st_size, about.st_mtime_ns) for path, about in found.items()}


@pytest.mark.slow
def test_the_last_evaluation_is_made_again_if_it_was_cut(tmp_path: Path) -> None:
    """As a kill leaves it: the last step is saved, its evaluation is not written. Once there, it stays."""
    run_dir, suite = tmp_path / "run", tmp_path / "sums.jsonl"
    suite.write_text("".join((ROOT / "recipes/demo/eval.jsonl").read_text().splitlines(keepends=True)[:10]))
    flags = ("--steps=2", f"--evaluation.suites={suite}", "--evaluation.every=2", "--parallel.data=2")
    finish(start(run_dir, *flags))
    responses, log = run_dir / "evaluation/step_000002.jsonl", run_dir / "evaluations.jsonl"
    before, rows, updates = responses.read_bytes(), read_jsonl(log), results(run_dir, "updates.jsonl")
    responses.unlink()
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    assert "resume at the evaluation of step 2, processes: 2" in finish(start(run_dir, *flags))
    assert [row["kind"] for row in read_jsonl(run_dir / "events.jsonl")].count("resume") == 1
    assert [row["step"] for row in read_jsonl(log)] == [0, 2]
    assert read_jsonl(log)[1]["eval/mean"] == rows[1]["eval/mean"]
    assert responses.read_bytes() == before
    assert results(run_dir, "updates.jsonl") == updates
    made = files_of(run_dir)
    output = finish(start(run_dir, *flags))
    assert "all 2 steps are done" in output
    assert files_of(run_dir) == made
    refused = start(run_dir, *flags, "--steps=1", "--evaluation.every=1")
    assert "steps=1, but" in output_of(refused)
    assert refused.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("leave_kilobytes", [0, 2500])
def test_a_full_disk_stops_the_run_and_room_continues_it(
    leave_kilobytes: int, whole: Path, tmp_path: Path
) -> None:
    """With no room at all, whatever is written next fails; with 2.5 MB the next checkpoint, of 3.8 MB."""
    with small_disk(tmp_path / "disk", 40 * 2**10) as disk:
        run_dir = disk / "run"
        process = start(run_dir, "--steps=3")
        wait_for_steps(process, run_dir, 1)
        ballast = fill(disk, leave_kilobytes)
        output = output_of(process)
        assert process.returncode == 3, output[-3000:]
        assert f"could not be written to {run_dir}" in output
        assert "No space left on device" in output or "a file was cut short" in output
        assert "Traceback" not in output, output
        assert output.endswith("the same command continues the run\n")
        ballast.unlink()
        finish(start(run_dir, "--steps=3"))
        for log in ("metrics.jsonl", "updates.jsonl"):
            assert results(run_dir, log) == [row for row in results(whole, log) if row["step"] <= 3]


@pytest.mark.slow
def test_two_ranks_end_with_one_message_when_a_checkpoint_fails(tmp_path: Path) -> None:
    """Only one of them knows what has failed."""
    with small_disk(tmp_path / "disk", 40 * 2**10) as disk:
        process = start(disk / "run", "--parallel.tensor=2")
        wait_for_steps(process, disk / "run", 1)
        fill(disk, 2500)
        output = output_of(process)
    assert process.returncode == 3, output[-3000:]
    assert output.count("stopped: ") == 1
    assert "could not be written to " in output
    assert "Traceback" not in output, output


@pytest.mark.slow
def test_lagged_bounds_come_back(whole: Path, tmp_path: Path) -> None:
    """They follow from the update before, which a continuation has not made."""
    lagged = ("--algorithm.bounds.scope=lagged", "--algorithm.bounds.bounds-tokens=None")
    flags = [f"--rollout.replay={whole}", *lagged, "--checkpoint.every=3"]
    unbroken, run_dir = tmp_path / "unbroken", tmp_path / "killed"
    finish(start(unbroken, *flags))
    process = start(run_dir, *flags)
    wait_for_steps(process, run_dir, 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finish(start(run_dir, *flags))
    assert "resume" in [row["kind"] for row in read_jsonl(run_dir / "events.jsonl")]
    assert results(run_dir, "updates.jsonl") == results(unbroken, "updates.jsonl")
    rows = read_jsonl(run_dir / "updates.jsonl")
    of_first_update = next(row for row in rows if row["step"] == 4)
    assert of_first_update["bapo/clip_high_distance"] != 0  # not searched anew
    for earlier, later in pairwise(rows):  # the bounds exact for one update are those of the next
        exact = earlier["bapo/clip_high"] - earlier["bapo/clip_high_distance"]
        assert later["bapo/clip_high"] == pytest.approx(exact)


def test_four_processes_agree_on_the_same_rollouts(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "four"
    layout = ["--parallel.tensor=2", "--parallel.pipeline=2"]
    finish(start(run_dir, *layout, f"--rollout.replay={whole}"))
    check_like(run_dir, whole)
    assert json.loads((run_dir / "config.json").read_text())["config"]["parallel.tensor"] == 2


@pytest.mark.slow
def test_torchrun_starts_the_same_program(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "torchrun"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    finish(start(run_dir, f"--rollout.replay={whole}", launcher=launcher))
    check_like(run_dir, whole)


def test_the_trainers_log_probs_are_the_engines(whole: Path, tmp_path: Path) -> None:
    """Here the engine holds the trainer's weights in float32: pi_old is pi_rollout and weights are 1."""
    run_dir = tmp_path / "trainer"
    flags = ["--algorithm.old-log-probs=trainer", "--algorithm.importance-cap=1.5"]
    finish(start(run_dir, "--parallel.data=2", f"--rollout.replay={whole}", *flags))
    check_like(run_dir, whole)
    assert all(row["rollout/engine_gap_mean"] < 1e-4 for row in results(run_dir))


@pytest.mark.slow
def test_a_gap_stops_the_run_when_asked_and_else_warns(tmp_path: Path) -> None:
    """No maximum is told below 1e-6, so this limit is always passed."""
    run_dir = tmp_path / "gap"
    flags = ["--steps=2", "--parallel.data=2", "--algorithm.gap-max-limit=1e-9"]
    process = start(run_dir, *flags, "--algorithm.on-gap=stop")
    output = output_of(process)
    assert process.returncode == 2, output[-2000:]
    assert "error: step 1: engine and trainer differ" in output
    assert "Traceback" not in output, output
    assert [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")] == [1]
    output = finish(start(run_dir, *flags))  # the limits may change
    assert "warning: step 1: engine and trainer differ" in output
    events = read_jsonl(run_dir / "events.jsonl")
    gaps = [(row["step"], row["on_gap"]) for row in events if row["kind"] == "engine_gap"]
    assert gaps == [(1, "stop"), (1, "warn"), (2, "warn")]


def test_sigint_to_the_command_alone_stops_its_processes(tmp_path: Path) -> None:
    run_dir = tmp_path / "interrupted"
    process = start(run_dir, "--parallel.tensor=2")
    wait_for_steps(process, run_dir, 1)
    os.kill(process.pid, signal.SIGINT)
    output = output_of(process)
    assert process.returncode == 130, output[-2000:]
    assert "\nstopped\n" in output
    assert "Traceback" not in output, output
    with pytest.raises(ProcessLookupError):
        for _ in range(3000):  # the sampler ends when it notices that the trainer has
            os.killpg(process.pid, 0)  # nobody of its group is left
            time.sleep(0.1)


@pytest.mark.slow
def test_one_run_directory_has_one_run(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "twice"
    first = start(run_dir, "--steps=3")
    wait_for_steps(first, run_dir, 1)
    os.killpg(first.pid, signal.SIGSTOP)  # so that it cannot end while the second starts
    second = start(run_dir, "--parallel.tensor=2")
    output = output_of(second)
    os.killpg(first.pid, signal.SIGCONT)
    assert second.returncode == 2, output[-2000:]
    assert "another process is writing to the run" in output
    assert "Traceback" not in output, output
    finish(first)
    assert results(run_dir) == results(whole)[:3]
