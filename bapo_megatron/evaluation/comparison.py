"""Paired comparison of two evaluations of the same suites: differences, intervals, p-values.

It reads the folders that ``bapo eval`` wrote. ConfigError if they cannot be compared. Used by
``command.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.responses import RESPONSES, SUMMARY, flat_settings, read_responses, read_summary
from bapo_megatron.evaluation.statistics import (
    Interval,
    bootstrap_intervals,
    detectable_difference,
    sign_flip_p_value,
    standard_deviation,
)


@dataclass(frozen=True)
class Compared:
    """Comparison of one suite, as plain data: avg@n of evaluation A and of B.

    All but the p-value are shares of 1; differences are B - A. Made by ``compare_suite``, printed by ``bapo
    eval compare``.
    """

    suite: str
    problems: int
    samples: tuple[int, int]
    a: float
    b: float
    difference: float
    interval: Interval
    """95 % bootstrap over problems."""
    p_value: float
    """P-value of the exact paired sign-flip test over problems."""
    detectable: float
    """Minimal detectable difference: a true difference that four of five comparisons would show."""
    better: int
    """Problems that B solves more often than A."""
    worse: int
    other_settings: tuple[str, ...]
    """Settings besides the model that differ."""


def compare(a: Path, b: Path) -> list[Compared]:
    """Paired comparison of every suite that both evaluations have.

    ``a`` and ``b``: outputs of `bapo eval`, or the folders of one suite. ConfigError if one is not finished,
    or if their problems differ.
    """
    return [compare_suite(name, *folders) for name, folders in suites_of_both(a, b).items()]


def suites_of_both(a: Path, b: Path) -> dict[str, tuple[Path, Path]]:
    """The folders of each suite that both evaluations have, by its name. ConfigError if there is none."""
    folders_a, folders_b = _suites(a), _suites(b)
    both = {name: (folder, folders_b[name]) for name, folder in folders_a.items() if name in folders_b}
    if not both:
        raise ConfigError(
            f"{a} has {', '.join(folders_a)} and {b} has {', '.join(folders_b)}: no suite is in both"
        )
    return both


def _suites(path: Path) -> dict[str, Path]:
    if (path / SUMMARY).is_file():
        return {read_summary(path)["suite"]["name"]: path}
    found = {folder.name: folder for folder in sorted(path.glob("*/")) if (folder / SUMMARY).is_file()}
    if not found:
        raise ConfigError(f"{path} holds no finished evaluation ({SUMMARY}); give an output of `bapo eval`")
    return found


def compare_suite(name: str, a: Path, b: Path) -> Compared:
    """Comparison of one suite in both evaluations."""
    summary_a, summary_b = read_summary(a), read_summary(b)
    if summary_a["suite"]["sha256"] != summary_b["suite"]["sha256"]:
        raise ConfigError(f"suite {name}: {a} and {b} asked different problems (their files' SHA-256 differ)")
    if (reward_a := summary_a.get("reward")) != (reward_b := summary_b.get("reward")):
        names = [one["function"] if one else "math or code" for one in (reward_a, reward_b)]
        raise ConfigError(f"suite {name}: {a} and {b} were scored by other rewards ({', '.join(names)})")
    samples_a, samples_b = int(summary_a["samples"]), int(summary_b["samples"])
    correct_a, correct_b = _correct(a, samples_a), _correct(b, samples_b)
    problems = range(int(summary_a["suite"]["problems"]))
    # In integers, so that equal sums are exactly equal.
    unit = lcm(samples_a, samples_b)
    steps = [correct_b[p] * (unit // samples_b) - correct_a[p] * (unit // samples_a) for p in problems]
    difference_P = np.array(steps) / unit
    return Compared(
        suite=name,
        problems=len(problems),
        samples=(samples_a, samples_b),
        a=correct_a.total() / samples_a / len(problems),
        b=correct_b.total() / samples_b / len(problems),
        difference=sum(steps) / unit / len(problems),
        interval=bootstrap_intervals(difference_P[:, None])[0],
        p_value=sign_flip_p_value(steps),
        detectable=detectable_difference(standard_deviation(difference_P), len(problems)),
        better=sum(step > 0 for step in steps),
        worse=sum(step < 0 for step in steps),
        other_settings=tuple(_differences(summary_a, summary_b)),
    )


def _correct(folder: Path, samples: int) -> Counter[int]:
    return Counter(one.problem for one in read_responses(folder / RESPONSES, samples) if one.correct)


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    ours, theirs = flat_settings({"sampling": a["sampling"]}), flat_settings({"sampling": b["sampling"]})
    return [
        f"{name}: {ours[name]!r}, {theirs.get(name)!r}" for name in ours if ours[name] != theirs.get(name)
    ]
