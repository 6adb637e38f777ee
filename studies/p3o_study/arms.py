"""Arms of the study of P3O: P3O, BAPO and GRPO on the second study's task and on a real model."""

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
from studies.gpu_study.figures import figures_of, mean, numbers, raised, stale_updates

ROOT = Path(__file__).parents[2]
SECOND_STUDY = ROOT / "studies/results/controller_study.jsonl"
REAL_STUDY = ROOT / "studies/results/real_model_study.jsonl"
TASK_COMMIT = "f6aa2582"
TASK = ("policy_study_long", "train_study.jsonl", "eval_study.jsonl")
STALENESS = 8
SEEDS, REAL_SEEDS = range(12), range(4)
LOW, REAL = "@0.35", "@real"
"""Suffixes of arms: at 0.35 of the rate, the best in the second study for every method that it tuned; on
SmolLM2-135M-Instruct."""
BOUNDS = {"grpo": grpo(), "paper": dataclasses.replace(paper(), bounds_tokens=256)}
P3O = ("p3o", "p3o_sequence")
METHODS = (*P3O, "paper", "grpo", "paper_sequence", "grpo_sequence")
"""Methods at the full rate. At 0.35 of it and on the real model P3O alone runs, against published runs."""

Figures = dict[str, float]
Line = dict[str, Any]
"""A line of the results: arm, method, passes, seed, command and figures."""


@dataclass(frozen=True)
class Task:
    """What a method learns: the recipe of its runs, their steps, rate, and steps between checkpoints."""

    recipe: Path
    steps: int
    rate: float
    checkpoint_every: int


SUMS = Task(Path(__file__).with_name("recipe.py"), 20, 1.7e-4, 10)
"""The second study's."""
CHAT = Task(Path(__file__).with_name("real_recipe.py"), 10, 1.5e-5, 5)
"""The real model's."""


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
    def task(self) -> Task:
        """The task that the arm trains on."""
        return CHAT if self.method.endswith(REAL) else SUMS

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `bapo train` that say what it is, and not where."""
        base = self.method.partition("@")[0]
        rate = self.task.rate * (0.35 if self.method.endswith(LOW) else 1)
        loss, _, by_sequence = base.partition("_")
        bounds = dataclasses.asdict(BOUNDS.get(loss, BoundsConfig())).items()
        return (
            *(f"--seed={self.seed}", f"--steps={self.task.steps}"),
            *(f"--algorithm.bounds.{name.replace('_', '-')}={value}" for name, value in bounds),
            f"--algorithm.loss={'clip' if loss in BOUNDS else loss}",
            f"--algorithm.loss-mean={by_sequence or 'token'}",
            *(
                "--algorithm.reuse-epochs=2",
                "--algorithm.updates-per-epoch=4",
                "--optimizer.warmup-updates=32",
            ),
            f"--optimizer.lr={rate:.6g}",
            f"--checkpoint.every={self.task.checkpoint_every}",
            *(f"--evaluation.every={self.task.steps}", "--evaluation.samples=4"),
        )

    def is_done(self) -> bool:
        """Whether the weights of its last step are evaluated."""
        return self.run_dir.is_dir() and self.task.steps in evaluation_means(self.run_dir)

    def line(self) -> Line:
        """The arm's line of the results."""
        stale = stale_updates(read_run(self.run_dir))
        shares, chances = (np.array(raised(stale, what)) for what in ("tokens", "probability"))
        found = figures_of(self.run_dir, self.task.steps) | {
            "raised_probability": float(np.nansum(shares * chances) / max(np.nansum(shares), 1e-12)),
            "ess": mean(numbers(stale, "policy/ess")),
        }
        return {
            "arm": self.name,
            "method": self.method,
            "passes": STALENESS,
            "seed": self.seed,
            "command": ["train", self.task.recipe.name, *self.flags],
            "figures": {name: rounded(value) for name, value in found.items()},
        }


def rounded(value: float) -> float | None:
    """A figure as published: five digits; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def arms(folder: Path) -> list[Arm]:
    """All arms: seed by seed at the full rate, then P3O at the lower one, then on the real model."""
    full = [(method, seed) for seed in SEEDS for method in METHODS]
    low = [(method + LOW, seed) for seed in SEEDS for method in P3O]
    real = [(P3O[0] + REAL, seed) for seed in REAL_SEEDS]
    every = (*full, *low, *real)
    return [Arm(method, seed, folder / "arms" / f"{method}-seed{seed}") for method, seed in every]


def run_arm(arm: Arm) -> None:
    """Main function of an arm's process: `bapo train`, whose output goes to a log beside the run."""
    from bapo_megatron.cli import run

    arm.run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(f"{arm.run_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    where = (f"--run-dir={arm.run_dir}", f"--name={arm.name}")
    sys.exit(run(["train", str(arm.task.recipe), *where, *arm.flags]))


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


def prepare_problems() -> None:
    """Prepare the real model's problems, as its study did, if missing. SystemExit without the model."""
    from bapo_megatron.cli import run

    model, data = Path("models/SmolLM2-135M-Instruct"), Path("data/one_digit_reasoned")
    if not (model / "config.json").is_file():
        raise SystemExit(f"the real model is not in {model}: `make real-model` fetches it")
    digits = {"min_digits": 1, "max_digits": 1}
    tasks = {"chain_sum": {"min_terms": 2, "max_terms": 2, **digits}, "products": digits}
    common = (
        *("data", "prepare", "reasoning-gym:chain_sum,products", f"--task-settings={json.dumps(tasks)}"),
        *("--system-prompt=Think step by step, then write the result.", f"--tokenizer={model}"),
        "--max-prompt-tokens=64",
    )
    held_out = data / "held_out"
    against = f"--against={held_out / 'data.jsonl'}"
    parts = {"held_out": ("--size=60", "--seed=1"), "train": ("--size=200", against)}
    for name, flags in parts.items():
        if not (data / name / "data.jsonl").exists() and run([*common, *flags, f"--output={data / name}"]):
            raise SystemExit(f"the problems of {data / name} could not be prepared")


def published() -> list[Line]:
    """The second study's own runs and the real model's, without those that chose rates or calibrated."""
    return [
        *(line for line in _lines(SECOND_STUDY) if line["seed"] in SEEDS),
        *({**line, "method": line["method"] + REAL} for line in _lines(REAL_STUDY)),
    ]


def _lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]
