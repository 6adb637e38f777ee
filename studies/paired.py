"""Paired t-test of two arms over seeds: interval, p-value, Holm's correction; Fisher's test of collapses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
LEAST_PAIRS = 3
"""Minimum pairs for a p-value: two differences can agree by chance."""


@dataclass(frozen=True)
class Effect:
    """Mean difference over seeds, with its interval."""

    mean: float
    low: float
    """Lower end of the interval; minus infinity for a single seed."""
    high: float
    pairs: int
    """Seeds that both sides have."""


def paired_effect(differences: Sequence[float], confidence: float = CONFIDENCE) -> Effect | None:
    """Mean difference with Student's interval, mean +- t(n - 1) s / sqrt(n). None without differences.

    A single difference has an infinite interval; equal differences have an interval of zero width.
    """
    count = len(differences)
    if count == 0:
        return None
    mean = fmean(differences)
    if count == 1:
        return Effect(mean, -math.inf, math.inf, 1)
    half = t_quantile((1 + confidence) / 2, count - 1) * stdev(differences) / math.sqrt(count)
    return Effect(mean, mean - half, mean + half, count)


def p_value(differences: Sequence[float]) -> float | None:
    """Two-sided p-value of Student's paired test that the mean difference is 0.

    None for fewer than ``LEAST_PAIRS`` differences. For equal differences: 0, or 1 if they are 0.
    """
    count = len(differences)
    if count < LEAST_PAIRS:
        return None
    mean, spread = fmean(differences), stdev(differences)
    if spread == 0:
        return float(mean == 0)
    return 2 * (1 - t_probability(abs(mean) * math.sqrt(count) / spread, count - 1))


def fisher(first: int, second: int, runs: int) -> float:
    """Two-sided p-value of Fisher's exact test: ``first`` and ``second`` of ``runs`` runs each collapsed.

    Probability, if the collapses were assigned at random, of a split that is no likelier than this one.
    """
    total = first + second
    ways = [math.comb(runs, mine) * math.comb(runs, total - mine) for mine in range(total + 1)]
    return sum(count for count in ways if count <= ways[first]) / math.comb(2 * runs, total)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979), in input order: all below 0.05 hold together at 5 %.

    The k-th smallest of m (k from 0) is multiplied by m - k, raised to its predecessors' maximum, capped at
    1.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t with ``freedom`` degrees of freedom, by bisection of ``t_probability``.

    Raises ValueError unless 0.5 <= probability < 1 and freedom >= 1.
    """
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(f"no quantile for probability {probability} and {freedom} degrees of freedom")
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def t_probability(value: float, freedom: int) -> float:
    """Probability that Student's t is at most ``value``, for integer degrees of freedom n: a finite sum.

    With a = atan(t / sqrt(n)) the probability of abs(T) <= t is, for odd n > 1, 2/pi (a + sin a (cos a + 2/3
    cos^3 a + ... )), up to power n - 2 (2 a / pi for n = 1); for even n, sin a (1 + 1/2 cos^2 a + 1 3/(2 4)
    cos^4 a + ...), also up to n - 2 (Abramowitz and Stegun, 26.7.3, 4).
    """
    angle = math.atan2(abs(value), math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + math.copysign(within, value) / 2
