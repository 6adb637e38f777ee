"""Contrasts between two methods, paired by seed; and the out-of-sample choice of a repair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.study.measures import ArmRecord, entropies_at_equal_reward
from benchmarks.study.methods import BAPO, BASELINE, FIXED_PAIRS, PRIMARY, REPAIRS
from benchmarks.study.paired import Effect, holm, p_value, paired_effect

OUTCOME = "mean_reward"
"""The figure of the primary contrasts: mean reward over the run."""
MATTERS = 0.05
"""The least difference in mean reward that matters."""
LEVEL = 0.05
PRIMARY_RIVALS = (BASELINE, "fixed_0.9_3.0", "fixed_0.9_1.2")


@dataclass(frozen=True)
class Contrast:
    """The difference ``method - other`` in one figure at some passes."""

    method: str
    other: str
    passes: int
    figure: str
    effect: Effect | None
    """None if no seed has both."""
    p: float | None
    """Two-sided p-value; None with too few seeds. Holm's where several are judged together."""

    @property
    def words(self) -> str:
        """The verdict in words that need no legend."""
        if self.effect is None:
            return "not run"
        if self.p is None:
            return "too few seeds to say"
        if self.p < LEVEL:
            size = "" if abs(self.effect.mean) >= MATTERS else f", by less than the {MATTERS:g} that matters"
            return f"{'better' if self.effect.mean > 0 else 'worse'}{size}"
        if self.effect.high < MATTERS:
            return f"no difference shown; an advantage of {MATTERS:g} or more is ruled out"
        return f"no difference shown; an advantage of {MATTERS:g} or more is not ruled out"


@dataclass(frozen=True)
class Choice:
    """A method chosen among several on some seeds, to be judged on others."""

    method: str
    seeds: tuple[int, ...]
    """Seeds of the choice."""
    mean: float
    """Mean of the outcome on them."""


@dataclass(frozen=True)
class OutOfSample:
    """The repair and the fixed pair that did best on half of the seeds, compared on the other half."""

    repair: Choice
    fixed: Choice
    contrast: Contrast


def by_seed(records: Sequence[ArmRecord], method: str, passes: int, figure: str) -> dict[int, float]:
    """A method's figure by seed, of the runs that have it."""
    return {
        record.seed: record.figures[figure]
        for record in records
        if (record.method, record.passes) == (method, passes) and math.isfinite(record.figures[figure])
    }


def contrast(
    records: Sequence[ArmRecord],
    method: str,
    other: str,
    passes: int,
    figure: str = OUTCOME,
    other_passes: int | None = None,
) -> Contrast:
    """The contrast of two methods on the seeds that both have; ``other_passes``: where not ``passes``."""
    mine, theirs = (
        by_seed(records, method, passes, figure),
        by_seed(records, other, other_passes or passes, figure),
    )
    return _contrast(
        method, other, passes, figure, [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    )


def primary(records: Sequence[ArmRecord]) -> list[Contrast]:
    """The primary contrasts, with Holm's p-values. A contrast that was not run corrects nothing."""
    found = [contrast(records, BAPO, other, PRIMARY) for other in PRIMARY_RIVALS]
    tested = [(place, one.p) for place, one in enumerate(found) if one.p is not None]
    for (place, _), p in zip(tested, holm([p for _, p in tested]), strict=True):
        one = found[place]
        found[place] = Contrast(one.method, one.other, one.passes, one.figure, one.effect, p)
    return found


def entropy_at_equal_reward(records: Sequence[ArmRecord], method: str, other: str, passes: int) -> Contrast:
    """The difference in entropy where both first reach the best reward that both reach, nats per token."""
    mine, theirs = (
        {one.seed: one for one in records if (one.method, one.passes) == (name, passes)}
        for name in (method, other)
    )
    pairs = [entropies_at_equal_reward(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    differences = [one - two for one, two in pairs if math.isfinite(one - two)]
    return _contrast(method, other, passes, "entropy", differences)


def out_of_sample(records: Sequence[ArmRecord], passes: int = PRIMARY) -> OutOfSample | None:
    """Best repair against best fixed pair, chosen on the first half of the seeds and compared on the second.

    None unless each half has seeds on which at least one repair and one fixed pair have run.
    """
    found = {
        name: values
        for name in (*REPAIRS, *FIXED_PAIRS)
        if (values := by_seed(records, name, passes, OUTCOME))
    }
    seeds = sorted(set.intersection(*map(set, found.values()))) if found else []
    half = len(seeds) // 2
    choose, judge = seeds[:half], seeds[half:]
    if not choose or not found.keys() & REPAIRS.keys() or not found.keys() & set(FIXED_PAIRS):
        return None
    repair, pair = (_best(found, names, choose) for names in (tuple(REPAIRS), FIXED_PAIRS))
    differences = [found[repair.method][seed] - found[pair.method][seed] for seed in judge]
    judged = _contrast(repair.method, pair.method, passes, OUTCOME, differences)
    return OutOfSample(repair, pair, judged)


def _best(found: dict[str, dict[int, float]], names: Sequence[str], seeds: Sequence[int]) -> Choice:
    means = {name: fmean(found[name][seed] for seed in seeds) for name in names if name in found}
    best = max(means, key=lambda name: means[name])
    return Choice(best, tuple(seeds), means[best])


def _contrast(method: str, other: str, passes: int, figure: str, differences: list[float]) -> Contrast:
    return Contrast(method, other, passes, figure, paired_effect(differences), p_value(differences))
