"""Rate-limited reports of failed scores and steps: each distinct one once with its traceback, then counts.

The counts live in memory, so they begin anew with the process. Used in ``rollout/sampler/``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

_MOST_KINDS = 50
"""Limit of distinct failures; further ones count together."""


class Result(Protocol):
    """A result that may be a failure (protocol): of a score, or of an environment's step."""

    @property
    def failure(self) -> str | None:
        """Kind of the failure, or None."""

    @property
    def detail(self) -> str:
        """Text of the failure."""

    @property
    def traceback(self) -> str:
        """Traceback, if a user's code raised."""

    @property
    def place(self) -> str:
        """Identity of a mistake in a user's code."""


class FailureReports:
    """Reporter of failures: the 1st, 10th, 100th ... of each kind, the first with its traceback.

    Two failures are of one kind if their ``failure`` and ``place`` are equal. Made by ``RobustScorer`` and
    ``Stepper``.
    """

    def __init__(self, report: Callable[..., None], event: str = "reward_failed") -> None:
        """``report`` is called with the kind of the event, and its fields."""
        self._report, self._event = report, event
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, result: Result) -> None:
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
            self._report(self._event, failure=kind[0], detail=result.detail, count=count, **stack)
