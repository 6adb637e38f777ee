"""Tables of the studies' documents in Markdown: differences with intervals, means with spreads.

Used by ``document.py`` and in ``benchmarks/study/controller/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from bapo_megatron.evaluation.scoring import standard_deviation
from benchmarks.study.contrasts import Contrast


def effect_text(one: Contrast) -> str:
    """The difference with its interval and seeds; a dash if no seed has both."""
    effect = one.effect
    if effect is None:
        return "-"
    if effect.pairs == 1:
        return f"{effect.mean:+.3f}, 1 seed"
    return f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f}), {effect.pairs} seeds"


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
