"""Idle-search notice: says when BAPO's bounds never move, so that the run equals one with fixed bounds.

The recorder of rank 0 asks once a step, and writes the notice as an event, at most once in a run. Used by
``train.py`` and ``recorder.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.types import Metrics

MOVED = "bapo/bounds_moved"
"""Metric: whether the search of a stale update moved a bound, 1 or 0; None for an on-policy update, absent
where nothing is searched."""

_UPDATES = 16
"""Stale updates without a move after which the notice is given: two steps of the usual reuse (2 x 4)."""


class IdleSearch:
    """Counter of stale updates, whose ratios are not all 1, in which no bound moved, from the run's start on.

    It is not in checkpoints: a resumed process has not seen the first updates, and gives no notice. Made by
    ``Recorder``, which asks it once a step.
    """

    def __init__(self, bounds: BoundsConfig, first_step: int) -> None:
        self._bounds = bounds
        self._first_step: int | None = None
        self._shares: list[float] = []
        self._is_over = first_step > 1

    def observe(self, step: int, updates: Sequence[Metrics]) -> str | None:
        """The notice after ``step``; None if there is none."""
        for update in updates:
            if self._is_over or update.get(MOVED) is None:
                continue
            if update[MOVED]:
                self._is_over = True
                continue
            self._first_step = self._first_step or step
            self._shares.append(update["bapo/contribution"] or 0.0)
        if self._is_over or len(self._shares) < _UPDATES:
            return None
        self._is_over = True
        return self._message(step)

    def _message(self, step: int) -> str:
        bounds, share = self._bounds, sum(self._shares) / len(self._shares)
        why = ""
        if math.isfinite(share) and share >= bounds.target:
            why = (
                f", because positive tokens hold {share:.2g} of the {bounds.measure}, above the target of "
                f"{bounds.target:g}"
            )
        return (
            f"the bounds have not moved in the first {len(self._shares)} stale updates (steps "
            f"{self._first_step} to {step}): so far this run equals fixed({bounds.low_start:g}, "
            f"{bounds.high_start:g}){why} (docs/algorithm.md#which-preset)"
        )
