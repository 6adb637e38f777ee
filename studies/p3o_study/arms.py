"""Arms of the P3O study: P3O, BAPO and GRPO with both loss means, on the second study's task."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.algo.bounds import BoundsConfig, grpo, paper
from bapo_megatron.commands.report.data import read_run
from bapo_megatron.trainer.records.metrics_log import evaluation_means
from studies.gpu_study.figures import figures_of, mean, numbers, stale_updates

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).with_name("recipe.py")
SECOND_STUDY = ROOT / "studies/results/controller_study.jsonl"
TASK_COMMIT = "f6aa2582"
TASK = ("policy_study_long", "train_study.jsonl", "eval_study.jsonl")
STEPS, STALENESS, RATE = 20, 8, 1.7e-4
SEEDS = range(12)
LOW = "@0.35"
"""Suffix of arms at 0.35 of the rate, the best in the second study for every method that it tuned."""
BOUNDS = {"grpo": grpo(), "paper": dataclasses.replace(paper(), bounds_tokens=256)}
P3O = ("p3o", "p3o_sequence")
METHODS = (*P3O, "paper", "grpo", "paper_sequence", "grpo_sequence")
"""Methods at the full rate. At 0.35 of it only P3O runs; the second study has the others' runs."""

Figures = dict[str, float]
Line = dict[str, Any]
"""A line of the results: arm, method, passes, seed, command and figures."""


@dataclass(frozen=True)
class Arm:
    """The run of one method with one seed."""

    method: str
    seed: int
    run_dir: Path

    @property
    def name(self) -> str:
        """Name of the arm, as in the second study's results."""
        return f"{self.method}-{STALENESS}-seed{self.seed}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `bapo train` that define the arm, without its paths."""
        base, _, rate = self.method.partition("@")
        loss, _, by_sequence = base.partition("_")
        bounds = dataclasses.asdict(BOUNDS.get(loss, BoundsConfig())).items()
        return (
            *(f"--seed={self.seed}", f"--steps={STEPS}"),
            *(f"--algorithm.bounds.{name.replace('_', '-')}={value}" for name, value in bounds),
            f"--algorithm.loss={'clip' if loss in BOUNDS else loss}",
            f"--algorithm.loss-mean={by_sequence or 'token'}",
            *(
                "--algorithm.reuse-epochs=2",
                "--algorithm.updates-per-epoch=4",
                "--optimizer.warmup-updates=32",
            ),
            f"--optimizer.lr={RATE * float(rate or 1):.6g}",
            *("--checkpoint.every=10", f"--evaluation.every={STEPS}", "--evaluation.samples=4"),
        )

    def is_done(self) -> bool:
        """Whether the last step's weights are evaluated."""
        return self.run_dir.is_dir() and STEPS in evaluation_means(self.run_dir)

    def line(self) -> Line:
        """The arm's line of the results."""
        stale = stale_updates(read_run(self.run_dir))
        shares, chances = numbers(stale, "raised/tokens"), numbers(stale, "raised/probability")
        figures = figures_of(self.run_dir, STEPS) | {
            "raised_probability": float(np.nansum(shares * chances) / max(np.nansum(shares), 1e-12)),
            "ess": mean(numbers(stale, "policy/ess")),
        }
        return {
            "arm": self.name,
            "method": self.method,
            "passes": STALENESS,
            "seed": self.seed,
            "command": ["train", RECIPE.name, *self.flags],
            "figures": {name: rounded(value) for name, value in figures.items()},
        }


def rounded(value: float) -> float | None:
    """A figure as published: five digits; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def arms(folder: Path) -> list[Arm]:
    """All arms in run order: seed by seed at the full rate, then P3O at the lower one."""
    full = [(method, seed) for seed in SEEDS for method in METHODS]
    low = [(method + LOW, seed) for seed in SEEDS for method in P3O]
    return [Arm(method, seed, folder / "arms" / f"{method}-seed{seed}") for method, seed in (*full, *low)]


def run_arm(arm: Arm) -> None:
    """Main function of an arm's process: `bapo train`, whose output goes to a log beside the run."""
    from bapo_megatron.cli import run

    arm.run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(f"{arm.run_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(run(["train", str(RECIPE), f"--run-dir={arm.run_dir}", f"--name={arm.name}", *arm.flags]))


def prepare_task(folder: Path) -> Path:
    """Folder of the second study's policy and problems, extracted from the commit that ran it."""
    task = folder / "task"
    if not (task / TASK[-1]).exists():
        task.mkdir(parents=True, exist_ok=True)
        paths = [f"recipes/demo/{name}" for name in TASK]
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", TASK_COMMIT, *paths], check=True, capture_output=True
        )
        unpack = ["tar", "-x", "--strip-components=2", "-C", str(task)]
        subprocess.run(unpack, input=packed.stdout, check=True)
    return task


def published() -> list[Line]:
    """Lines of the second study, without its runs for rate selection and calibration."""
    lines = [json.loads(line) for line in SECOND_STUDY.read_text().splitlines()[1:]]
    return [line for line in lines if line["seed"] in SEEDS]
