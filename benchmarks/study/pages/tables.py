"""Tables of the studies' documents in Markdown: differences with intervals, means with spreads.

Used by ``document.py``, in ``benchmarks/study/controller/`` and ``benchmarks/study/real_model/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from bapo_megatron.evaluation.scoring import standard_deviation
from benchmarks.study.contrasts import Contrast, contrast
from benchmarks.study.measures import ArmRecord

OUTCOMES = {"mean_reward": "mean reward", "held_out": "held-out", "entropy_kept": "entropy kept"}
"""Figures that are compared, with their headings."""


def effect_text(one: Contrast) -> str:
    """The difference with its interval and seeds; a dash if no seed has both."""
    effect = one.effect
    if effect is None:
        return "-"
    if effect.pairs == 1:
        return f"{effect.mean:+.3f}, 1 seed"
    return f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f}), {effect.pairs} seeds"


def outcomes(
    records: Sequence[ArmRecord], method: str, other: str, passes: int, other_passes: int | None = None
) -> list[str]:
    """The differences of two arms in each of ``OUTCOMES``."""
    return [
        effect_text(contrast(records, method, other, passes, figure, other_passes)) for figure in OUTCOMES
    ]


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over seeds, of those that exist."""
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return "-"
    middle = f"{fmean(known):.{digits}f}"
    return f"{middle} ± {standard_deviation(known):.{digits}f}" if len(known) > 1 else middle


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
