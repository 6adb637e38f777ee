"""Paired differences between two arms, seed by seed, and the verdict on a claim about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

CONFIDENCE = 0.95
LEAST_PAIRS = 3
"""Two differences may be alike by luck, and their interval then says nothing."""
Verdict = Literal["seen", "not seen", "opposite", "not distinguishable", "not tried", "does not apply"]
"""``does not apply`` is for claims of bounds that move, where they rest, or the other way round."""


@dataclass(frozen=True)
class Effect:
    """A mean difference over seeds, with its interval."""

    mean: float
    low: float
    """Lower end of the interval; minus infinity for a single seed."""
    high: float
    pairs: int
    """Seeds that both sides have."""


def paired_effect(differences: Sequence[float], confidence: float = CONFIDENCE) -> Effect | None:
    """Mean difference with Student's interval, mean +- t(n - 1) s / sqrt(n). None without differences.

    A single difference has no spread: its interval is everything. Two or more that are all equal have an
    interval of no width.
    """
    count = len(differences)
    if count == 0:
        return None
    mean = fmean(differences)
    if count == 1:
        return Effect(mean, -math.inf, math.inf, 1)
    half = t_quantile((1 + confidence) / 2, count - 1) * stdev(differences) / math.sqrt(count)
    return Effect(mean, mean - half, mean + half, count)


def verdict(effect: Effect | None, claimed_sign: int, smallest: float) -> Verdict:
    """What ``effect`` says of a claim that the difference has the sign ``claimed_sign`` (1 or -1).

    ``smallest`` is the least size that would matter, in the figure's units. With the interval turned so that
    the claim points up, [low, high]:

    - seen: low > 0 and high >= smallest (it is there, and may well be large enough to matter);
    - opposite: high < 0 and low <= -smallest;
    - not seen: otherwise, high < smallest (an effect as claimed that matters is ruled out, not the opposite);
    - not distinguishable: all else, the interval holds both nothing and an effect that matters, or there are
      fewer than ``LEAST_PAIRS`` seeds;
    - not tried: no seed has both sides.
    """
    if effect is None:
        return "not tried"
    if effect.pairs < LEAST_PAIRS:
        return "not distinguishable"
    low, high = sorted((claimed_sign * effect.low, claimed_sign * effect.high))
    if low > 0 and high >= smallest:
        return "seen"
    if high < 0 and low <= -smallest:
        return "opposite"
    return "not seen" if high < smallest else "not distinguishable"


def t_quantile(probability: float, freedom: int) -> float:
    """The value below which Student's t with ``freedom`` degrees of freedom lies with this probability.

    By bisection of the exact distribution function. ValueError unless 0.5 <= probability < 1, freedom >= 1.
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
    """The chance that Student's t is at most ``value``, for whole degrees of freedom n: a finite sum.

    With a = atan(t / sqrt(n)) the chance of abs(T) <= t is, for odd n > 1,
    2/pi (a + sin a (cos a + 2/3 cos^3 a + ... )), the last power n - 2 (2 a / pi for n = 1); for even n,
    sin a (1 + 1/2 cos^2 a + 1 3/(2 4) cos^4 a + ...), again up to n - 2 (Abramowitz and Stegun, 26.7.3, 4).
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
