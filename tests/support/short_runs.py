"""Short runs of the demo by the command line, for tests that compare them bit for bit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.accounts import check_run
from tests.support.forked_commands import ROOT, ForkedCommand, start_bapo
from tests.support.metrics import results
from tests.support.processes import heed_signals
from tests.support.raw_journal import keeping_logs

Command = ForkedCommand | subprocess.Popen[bytes]
LIMIT_S = 900
TWO = ("--parallel.data=2",)
TWO_JUDGES = ("--reward.workers=2",)
"""Scores come in another order than they were asked for, which one worker never does."""
SUMS = f"--data.path={ROOT / 'tests/fixtures/sums.jsonl'}"
"""200 of the demo's 1,500 problems: to read all of them takes a start half a second of a core."""
SHORT = [
    f"--model.hf-path={ROOT / 'recipes/demo/policy'}",  # bounds end inside their ranges at this target
    "--rollout.max-response-tokens=64",
    "--steps=5",
    "--checkpoint.every=2",
    "--evaluation.every=0",
    "--reward.workers=1",
    "--reward.function=tests.support.reward_functions:boxed",
    "--rollout.prompts-per-step=6",
    "--rollout.group-size=4",
    "--algorithm.updates-per-epoch=2",
    "--optimizer.warmup-updates=10",  # the schedule's place must come back, too
    "--optimizer.lr=2e-4",  # so that ratios leave 1, and the bounds move
    "--algorithm.bounds.target=0.65",
]


def start(run_dir: Path, *flags: str, launcher: tuple[str, ...] = ()) -> Command:
    """``bapo train`` with the short demo, forked; or in interpreters that ``launcher`` starts."""
    data = () if any(flag.startswith("--data.") for flag in flags) else (SUMS,)
    words = ["train", "recipes/demo_cpu.py", *SHORT, *data, f"--run-dir={run_dir}", *flags]
    if not launcher:
        return start_bapo(*words)
    return subprocess.Popen(
        [*launcher, "-m", "bapo_megatron.cli", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=heed_signals,
    )


def output_of(process: Command) -> str:
    """All that it says until its end, which on a busy machine may be minutes away."""
    return process.communicate(timeout=LIMIT_S)[0].decode()


def finish(process: Command) -> str:
    output = output_of(process)
    assert process.returncode == 0, output[-3000:]
    return output


@contextmanager
def audited(run_dir: Path) -> Iterator[None]:
    """When the run is over, its journal is held to its rules."""
    kept = run_dir.with_name("kept")
    with keeping_logs(run_dir / "journal", kept):
        yield
    assert check_run(run_dir, kept).totals()["trained"] > 0


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "export/model.safetensors")


def wait_for_steps(process: Command, run_dir: Path, steps: int) -> None:
    """Until the metrics of ``steps`` steps are on disk, and from three on a checkpoint too."""
    log, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    deadline = time.monotonic() + LIMIT_S
    while (
        not log.exists()
        or log.read_bytes().count(b"\n") < steps
        or (steps >= 3 and not list(checkpoints.glob("step_*")))
    ):
        assert process.poll() is None, process.communicate()[0].decode()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_like(run_dir: Path, whole: Path) -> None:
    """Same bounds, and the same metrics to tolerance."""
    for ours, theirs in zip(results(run_dir), results(whole), strict=True):
        for bound in ("bapo/clip_low", "bapo/clip_high"):  # means over the tokens of search groups
            assert ours[bound] == pytest.approx(theirs[bound], rel=1e-12)
        for name in ("policy/entropy", "policy/grad_norm", "policy/kl", "policy/loss", "bapo/contribution"):
            assert ours[name] == pytest.approx(theirs[name], rel=5e-3, abs=1e-5), name
        assert ours["reward/mean"] == theirs["reward/mean"]
    [first, *_], [theirs, *_] = (results(run, "updates.jsonl") for run in (run_dir, whole))
    for name in ("policy/entropy", "policy/grad_norm", "policy/loss", "bapo/contribution"):
        assert first[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
