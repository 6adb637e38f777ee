"""Picture of the second study: each arm at staleness 8 minus GRPO's, at the recipe's rate and at its best.

Used by ``command.py``, late: it needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.study.controller.arms import RATES, STALE, VARIANTS, Variant
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BASELINE
from benchmarks.study.pages.figures import Panel, draw_differences


def draw(records: Sequence[ArmRecord], chosen: Mapping[str, float], file: Path) -> None:
    """Write the picture of the study's own ``records``; ``chosen`` has the best rate of each tuned method."""
    draw_differences(records, panels(chosen), file)


def panels(chosen: Mapping[str, float]) -> tuple[Panel, Panel]:
    """All arms at the recipe's rate and GRPO's lower ones minus GRPO; the tuned ones minus GRPO's best."""
    lowered = [Variant(BASELINE, rate) for rate in RATES[1:]]
    others = [Variant(name, 1.0) for name in VARIANTS if name != BASELINE]
    best = [Variant(name, rate) for name, rate in chosen.items() if name != BASELINE]
    return (
        Panel("at the recipe's rate", BASELINE, STALE, _labels([*lowered, *others])),
        Panel("each at its best rate", Variant(BASELINE, chosen[BASELINE]).name, STALE, _labels(best)),
    )


def _labels(arms: Sequence[Variant]) -> dict[str, str]:
    return {
        one.name: VARIANTS[one.method].label + (f", {one.rate:g} of the rate" if one.rate != 1 else "")
        for one in arms
    }
