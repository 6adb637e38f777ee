"""Figures of one run on stale data, from its logs; NaN where a log has no value.

*Stale* updates are those after the first of their step, in which all ratios are 1. If a run has one update a
step, all its updates take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from bapo_megatron.algo.bins import RATIO_BINS, RATIO_EDGES
from bapo_megatron.commands.report.data import RunRecord, read_run
from bapo_megatron.runtime.jsonl_log import Row
from bapo_megatron.trainer.records.metrics_log import evaluation_means

COLUMNS = {
    "mean_reward": ("mean reward", 3),
    "best_reward": ("best", 3),
    "final_reward": ("end", 3),
    "held_out": ("held-out", 3),
    "entropy_kept": ("entropy kept", 2),
    "clipped": ("clipped", 4),
    "positive_share": ("positive share", 3),
    "raised_tokens": ("tokens with r > 1.2", 4),
    "moved": ("bounds moved", 2),
    "clip_low": ("c_low", 3),
    "clip_high": ("c_high", 2),
}
"""Figures of the page: heading and decimal digits."""


def figures_of(run_dir: Path, steps: int) -> dict[str, float]:
    """The figures ``COLUMNS`` of a run of ``steps`` steps."""
    run = read_run(run_dir)
    reward, entropy = (
        running_means(run.by_step(name).value) for name in ("sampled/reward/mean", "policy/entropy")
    )
    stale = stale_updates(run)
    held_out = evaluation_means(run_dir).get(steps)
    first = run.updates.rows()[:1]
    positive = [numbers(stale, f"quadrant/positive_{side}/contribution") for side in ("low", "high")]
    clipped = [numbers(stale, f"bapo/clip_fraction_{side}") for side in ("low", "high")]
    return {
        "mean_reward": mean(run.by_step("sampled/reward/mean").value),
        "best_reward": max(reward, default=np.nan),
        "final_reward": reward[-1] if len(reward) else np.nan,
        "held_out": np.nan if held_out is None else held_out,
        "entropy_kept": entropy[-1] / mean(numbers(first, "policy/entropy")) if len(entropy) else np.nan,
        "clipped": mean(np.sum(clipped, axis=0)),
        "positive_share": mean(np.sum(positive, axis=0)),
        "raised_tokens": mean(np.sum(raised(stale, "tokens"), axis=0)),
        "moved": mean(numbers(stale, "bapo/bounds_moved")),
        "clip_low": mean(numbers(stale, "bapo/clip_low")),
        "clip_high": mean(numbers(stale, "bapo/clip_high")),
    }


def raised(rows: Sequence[Row], what: str) -> list[np.ndarray]:
    """A metric of the tokens with a ratio of 1.2 or more, by bin of the ratio."""
    return [numbers(rows, f"ratio/{name}/{what}") for name in RATIO_BINS[RATIO_EDGES.index(1.2) + 1 :]]


def running_means(values_S: np.ndarray) -> np.ndarray:
    """Running means of the finite values, over a tenth of the steps, at least 1 and at most 5."""
    known = values_S[np.isfinite(values_S)]
    window = min(max(len(values_S) // 10, 1), 5)
    return np.convolve(known, np.ones(window) / window, mode="valid") if len(known) >= window else known[:0]


def stale_updates(run: RunRecord) -> list[Row]:
    """Updates after the first of their step; all updates if each step has one."""
    rows = run.updates.rows()
    later = [row for before, row in pairwise(rows) if before["step"] == row["step"]]
    return later or rows


def numbers(rows: Sequence[Row], metric: str) -> np.ndarray:
    """Values of a metric, one per update; NaN where it is missing."""
    return np.array([np.nan if row.get(metric) is None else row[metric] for row in rows], float)


def mean(values: np.ndarray) -> float:
    """Mean of the finite values; NaN without any."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan
