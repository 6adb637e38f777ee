"""Each interval and p-value on the studies' pages, computed anew from the published figures of the runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies.paired import Effect, fisher, holm, p_value, paired_effect

ROOT = Path(__file__).parents[3]
PAGES = {
    "studies/results/staleness_study.md": "studies/results/staleness_study.jsonl",
    "studies/results/controller_study.md": "studies/results/controller_study.jsonl",
    "studies/results/real_model_study.md": "studies/results/real_model_study.jsonl",
}
"""Pages with their data."""
FIGURES = {
    "mean reward": "mean_reward",
    "held-out": "held_out",
    "entropy kept": "entropy_kept",
    "spikes / 100 updates": "spikes",
    "entropy at equal reward, nats": "",
    "difference (95 % interval), seeds": "mean_reward",
}
"""Figure of each column with intervals; of one it is computed from the curves."""
CALIBRATION_SEED = 100
"""First seed of the runs that only calibrated."""
EFFECT = re.compile(r"[+-]\d+\.\d{3} \([+-]\d+\.\d{3} to [+-]\d+\.\d{3}\), \d+ seeds")

Runs = dict[int, dict[str, Any]]
"""Runs of one method at one staleness, by seed."""


@cache
def runs(*data: str) -> dict[tuple[str, int], Runs]:
    found: dict[tuple[str, int], Runs] = {}
    for one in data:
        for run in map(json.loads, (ROOT / one).read_text().splitlines()[1:]):  # the first is the design
            if run["seed"] < CALIBRATION_SEED:
                found.setdefault((run["method"], run["passes"]), {})[run["seed"]] = run
    return found


def smooth(values: list[float | None], exists: np.ndarray) -> np.ndarray:
    """Running mean over a tenth of the steps, at most five."""
    window = min(max(len(values) // 10, 1), 5)
    return np.convolve(np.array(values, float)[exists], np.ones(window) / window, "valid")


def entropies_at_equal_reward(*pair: dict[str, Any]) -> list[float]:
    """Entropy of each run where it first reaches the best reward that both reach."""
    curves = []
    for run in pair:
        reward, entropy = (run["curves"][name] for name in ("reward", "entropy"))
        exists = np.isfinite(np.array(reward, float)) & np.isfinite(np.array(entropy, float))
        curves.append((smooth(reward, exists), smooth(entropy, exists)))
    level = min(reward.max() for reward, _ in curves)
    return [float(entropy[np.flatnonzero(reward >= level - 1e-12)[0]]) for reward, entropy in curves]


def differences(mine: Runs, other: Runs, figure: str) -> list[float]:
    """Of the seeds that both have."""
    values = []
    for seed in mine.keys() & other.keys():
        pair = mine[seed], other[seed]
        found = [run["figures"][figure] for run in pair] if figure else entropies_at_equal_reward(*pair)
        values += [found[0] - found[1]] if None not in found else []
    return values


def text(effect: Effect | None) -> str:
    assert effect is not None
    return f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f}), {effect.pairs} seeds"


def arm(words: str, passes: int) -> tuple[str, int]:
    """Method and staleness of `` `grpo`, 2x ``, `` `grpo` at 1 `` or `` `grpo` ``."""
    found = re.fullmatch(r"`([^`]+)`(?:, (\d+)x| at (\d+))?", words)
    assert found, words
    return found[1], int(found[2] or found[3] or passes)


Row = tuple[tuple[str, int], tuple[str, int], dict[str, str]]
"""An arm, the arm that it is compared with, and the row's other cells by their heading."""


def tables(page: str) -> Iterator[list[Row]]:
    """Tables with intervals."""
    passes = 8
    for block in (ROOT / page).read_text().split("\n\n"):
        if heading := re.fullmatch(r"At (\d) passes:", block.strip()):
            passes = int(heading[1])
        if not EFFECT.search(block) or not block.startswith("|"):
            continue
        (first, *heads), _, *lines = (
            [c.strip() for c in line.split("|")[1:-1]] for line in block.splitlines()
        )
        rows = []
        for name, *cells in lines:
            one, minus, other = name.partition(" - ")
            against = other if minus else (first.removeprefix("minus ") if "minus" in first else "`grpo`")
            rows.append((arm(one, passes), arm(against, passes), dict(zip(heads, cells, strict=True))))
        yield rows


@pytest.mark.parametrize(("page", "data"), PAGES.items())
def test_intervals_are_those_of_the_published_figures(page: str, data: str) -> None:
    by_arm, seen = runs(data), 0
    for one, other, cells in (row for rows in tables(page) for row in rows):
        for head in cells.keys() & FIGURES.keys():
            measured = differences(by_arm[one], by_arm[other], FIGURES[head])
            assert text(paired_effect(measured)) == cells[head], (one, other, head)
            seen += 1
    assert seen == len(EFFECT.findall((ROOT / page).read_text())) > 15


@pytest.mark.parametrize(("page", "data"), list(PAGES.items())[:2])
def test_p_values_of_the_claims(page: str, data: str) -> None:
    """By Student's paired t, corrected by Holm for the claims of a study together."""
    by_arm = runs(data)
    [claims] = [rows for rows in tables(page) if "Holm's p" in rows[0][2]]
    alone = [p_value(differences(by_arm[one], by_arm[other], "mean_reward")) for one, other, _ in claims]
    known = [p for p in alone if p is not None]
    assert [f"{p:.3g}" for p in holm(known)] == [cells["Holm's p"] for *_, cells in claims]
    if "p alone" in claims[0][2]:
        assert [f"{p:.3g}" for p in known] == [cells["p alone"] for *_, cells in claims]


def test_collapses_of_bapo_and_of_grpo() -> None:
    page, data = list(PAGES.items())[1]
    counts = [
        sum(int(run["figures"]["collapsed"]) for name in names for run in runs(data)[name, 8].values())
        for names in (("paper", "paper_sequence"), ("grpo", "grpo_sequence"))
    ]
    said = "{} of BAPO's 24 runs collapsed and {} of GRPO's: Fisher's p {:.2g}"
    assert said.format(*counts, fisher(*counts, 24)) in (ROOT / page).read_text()
