"""Loader of the paper's curves from the CSV files that benchmarks/paper_curves.py extracted from its PDF."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[2] / "data"


@dataclass(frozen=True)
class Curve:
    """One curve of the paper, NaN where it has no point."""

    step: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Read:
    """Description of the data taken from one of the paper's figures."""

    figure: str
    read: str
    limits: str
    """Data that were not taken, or are not comparable."""


READ = (
    Read(
        "Fig. 2, GRPO at several passes",
        "all curves, to step 150",
        "gradient norms below 0.1 and above 100",
    ),
    Read("Fig. 4, contributions", "both shares of the loss; they add up to 1", "passes are not said"),
    Read(
        "Fig. 7, fixed bounds",
        "both panels",
        "passes are not said; its [0.8, 1.2] keeps as little entropy as Fig. 2's 2x. Ours is at 8x",
    ),
    Read("Fig. 8, BAPO's bounds", "both curves", "means over all updates; ours leave the first pass out"),
    Read(
        "Fig. 9, BAPO and the baseline",
        "all curves but BAPO's gradient norm",
        "its baseline has the entropy of Fig. 2's 2x. Ours is at 8x",
    ),
    Read(
        "Fig. 10, probability over ratio",
        "8,000 points, in bins",
        "whose probability is not said; where the ratio is above 1.1, its product with the probability stays "
        "below 1 and comes up to 0.99, as with the old policy's. Ours is drawn for the present policy",
    ),
)
"""Data taken from the paper's figures, in its order."""


@cache
def _table(name: str) -> dict[str, np.ndarray]:
    """The columns of a file of numbers; NaN where a cell is empty."""
    with (DATA / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {column: np.array([float(row[column] or "nan") for row in rows]) for column in rows[0]}


def curves(panel: str) -> dict[str, Curve]:
    """The curves of a panel, such as ``fig2_reward``, by their names in its legend; empty if none."""
    table = _table("bapo_curves.csv")
    names = [name for name in table if name.startswith(f"{panel} ")]
    return {name.removeprefix(f"{panel} "): Curve(table["step"], table[name]) for name in names}


def fig_8(bound: str) -> Curve:
    """Fig. 8's curve of ``c_high`` or ``c_low``."""
    table = _table("bapo_fig8.csv")
    known = np.isfinite(table[bound])
    return Curve(table["step"][known], table[bound][known])


def fig_10() -> tuple[np.ndarray, np.ndarray]:
    """Fig. 10: middles of the bins of the ratio, and the mean probability in each."""
    table = _table("bapo_fig10.csv")
    return (table["from"] + table["to"]) / 2, table["probability"]
