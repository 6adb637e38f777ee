"""Response lengths of ``bapo plan``, log-normal up to a limit, and the cost of decoding them.

``ResponseLengths`` is the distribution; longer responses are cut at the limit and count with that length.
``decode_steps`` and ``read_tokens`` return the steps and the KV reads of decoding given lengths. Pure
functions without randomness.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, exp, log
from statistics import NormalDist

_NORMAL = NormalDist()
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class ResponseLengths:
    """Distribution of response lengths in tokens: log-normal, cut at the longest, with a given mean."""

    mean: float
    """Mean length, cut responses included."""
    spread: float
    """Standard deviation of log length before the cut."""
    longest: float
    """Length at which responses are cut."""

    @cached_property
    def _middle(self) -> float | None:
        """Log of the median before the cut, by bisection; None if all responses are cut."""
        if self.mean >= self.longest * (1 - 1e-9):
            return None
        low, high = log(self.mean) - self.spread**2, log(self.longest) + 40 * self.spread
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(middle) < self.mean else (low, middle)
        return low

    def _mean_at(self, middle: float) -> float:
        """Return the mean after the cut of a log-normal distribution with median ``exp(middle)``."""
        cut = (log(self.longest) - middle) / self.spread
        whole = exp(middle + self.spread**2 / 2) * _NORMAL.cdf(cut - self.spread)
        return whole + self.longest * _NORMAL.cdf(-cut)

    @property
    def cut_share(self) -> float:
        """Share of responses that are cut."""
        if self._middle is None:
            return 1.0
        return _NORMAL.cdf((self._middle - log(self.longest)) / self.spread)

    @property
    def running_mean(self) -> float:
        """Mean tokens of a running response: E[n^2] / (2 E[n]), since long responses run longer."""
        if self._middle is None:
            return self.longest / 2
        cut = (log(self.longest) - self._middle) / self.spread
        square = exp(2 * self._middle + 2 * self.spread**2) * _NORMAL.cdf(cut - 2 * self.spread)
        return (square + self.longest**2 * _NORMAL.cdf(-cut)) / self.mean / 2

    def quantile(self, share: float) -> float:
        """Return the length that a ``share`` of the responses does not exceed."""
        if self._middle is None:
            return self.longest
        return min(self.longest, max(1.0, exp(self._middle + self.spread * _NORMAL.inv_cdf(share))))

    def busiest_engine_lengths(self, count: int, of: int) -> list[float]:
        """Return lengths of the busiest engine's ``count`` responses, including the longest of all ``of``.
        Evenly spaced quantiles instead of random draws, in a fixed order that mixes short and long ones."""
        shares = [(i + 0.5) / count for i in range(count)]
        shares[-1] = 1 - 0.5 / max(count, of)
        order = sorted(range(count), key=lambda i: i * _GOLDEN % 1)
        return [self.quantile(shares[i]) for i in order]


response_lengths = lru_cache(maxsize=64)(ResponseLengths)
"""Cached constructor, for the layout search."""


def decode_steps(lengths: Sequence[float], slots: int) -> float:
    """Return decode steps until all responses are done, ``slots`` running at a time (continuous batching)."""
    ends = list(lengths[:slots])
    heapq.heapify(ends)
    for length in lengths[slots:]:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends, default=0.0)


def read_tokens(lengths: Sequence[float], prompt: float) -> float:
    """Return the number of KV entries that decoding reads: sum over responses n (prompt + n / 2). A response
    of n tokens reads its prompt n times and its own tokens n^2 / 2 times."""
    return sum(length * (prompt + length / 2) for length in lengths)


def busiest_engine_responses(responses: int, engines: int, imbalance: float) -> int:
    """Return the busiest engine's responses: ``imbalance`` x the mean over ``engines``."""
    return min(responses, max(1, ceil(responses / max(1, engines) * imbalance)))
