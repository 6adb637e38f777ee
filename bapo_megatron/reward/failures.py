"""Rate-limited reports of failed scores: each distinct failure once with its traceback, then counts.

The counts live in memory, so they begin anew with the process. Used by ``rollout/sampler/scoring.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from bapo_megatron.reward.pool import RewardResult

_MOST_KINDS = 50
"""Limit of distinct failures; further ones count together."""


class FailureReports:
    """Reporter of failed scores: the 1st, 10th, 100th ... of each kind, the first with its traceback.

    Two failures are of one kind if their ``failure`` and ``place`` are equal. Made by ``RobustScorer``.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        """``report`` is called with the kind of the event, ``reward_failed``, and its fields."""
        self._report = report
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, result: RewardResult) -> None:
        """Count ``result``, which may have no failure."""
        if result.failure is None:
            return
        kind: tuple[str, str] = (result.failure, result.place)
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = ("others", "")
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 10 ** (len(str(count)) - 1):
            stack = {"traceback": result.traceback} if count == 1 and result.traceback else {}
            self._report("reward_failed", failure=kind[0], detail=result.detail, count=count, **stack)
