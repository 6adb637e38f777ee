"""Analysis of the paper's Fig. 8: the search behind its clipping bounds, as a printed report.

    python -m studies.fig8_reading

``data/bapo_fig8.csv`` has the figure's two curves as numbers: the vector paths of paper.pdf in the authors'
repository (WooooDyy/BAPO at 58f8008), with steps rounded to integers; a few points have no step of their own.
The figure shows per-step means of c_high and c_low.

If a share q of a step's searches ends with both bounds at their ends (h1, l1) and the rest ends at (h0, l0),
the means are h = h0 + q (h1 - h0) and l = l0 + q (l1 - l0): points on one straight line through both.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

DATA = Path(__file__).with_name("data") / "bapo_fig8.csv"
LAST_ON_THE_LINE = 128
"""Last step at which both curves lie on one line, determined from the residuals in the report."""


class Fit(NamedTuple):
    """Least-squares line and correlation of the two curves."""

    steps: int
    slope: float
    """Slope of c_low over c_high."""
    at_zero: float
    """c_low at c_high = 0."""
    correlation: float
    sd_ratio: float
    """Standard deviation of c_low over that of c_high."""


def curves() -> tuple[dict[int, float], dict[int, float]]:
    """c_high and c_low by step."""
    with DATA.open() as file:
        rows = list(csv.DictReader(file))
    return tuple(  # type: ignore[return-value]
        {int(row["step"]): float(row[name]) for row in rows if row[name]} for name in ("c_high", "c_low")
    )


def by_step(high: dict[int, float], low: dict[int, float], first: int = 1, last: int = 999) -> np.ndarray:
    """Pairs (c_high, c_low) at the steps that both curves have, [steps, 2]."""
    steps = [step for step in sorted(high.keys() & low.keys()) if first <= step <= last]
    return np.array([(high[step], low[step]) for step in steps])


def interpolated(high: dict[int, float], low: dict[int, float]) -> np.ndarray:
    """Pairs (c_high, c_low) at every step from 2 to 146, linearly interpolated, [145, 2]."""
    steps = np.arange(2, 147)
    return np.stack([np.interp(steps, sorted(c), [c[s] for s in sorted(c)]) for c in (high, low)], axis=1)


def fit(pairs: np.ndarray) -> Fit:
    """Least-squares line of c_low over c_high, their correlation, and the ratio of standard deviations."""
    high, low = pairs.T
    slope, at_zero = np.polyfit(high, low, 1)
    return Fit(len(pairs), slope, at_zero, float(np.corrcoef(high, low)[0, 1]), float(low.std() / high.std()))


def searches_a_step(high: np.ndarray, rest: float, end: float) -> float:
    """Independent searches per step that explain the variance of c_high, if each ends at ``rest`` or ``end``.

    The share of n searches has the variance q (1 - q) / n.
    """
    share = (high - rest) / (end - rest)
    return float(share.mean() * (1 - share.mean()) / share.var())


def report() -> Iterator[str]:
    """Text of studies/results/fig8_reading.md, part by part."""
    high, low = curves()
    early, late = by_step(high, low, last=LAST_ON_THE_LINE), by_step(high, low, LAST_ON_THE_LINE + 1)
    yield "# Fig. 8 of the paper, read as numbers\n"
    yield "Command: `python -m studies.fig8_reading`; what the columns are is said there.\n"
    yield "| pairs of the two curves | steps | slope | c_low at c_high 1.2, at 3.0 | correlation | sd ratio |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, pairs in {
        "interpolated, steps 2 to 146": interpolated(high, low),
        "by step, all": by_step(high, low),
        f"by step, to {LAST_ON_THE_LINE}": early,
        f"by step, from {LAST_ON_THE_LINE + 1} on": late,
    }.items():
        f = fit(pairs)
        ends = ", ".join(f"{f.at_zero + f.slope * at:.3f}" for at in (1.2, 3.0))
        yield f"| {name} | {f.steps} | {f.slope:.4f} | {ends} | {f.correlation:.3f} | {f.sd_ratio:.3f} |"
    line = fit(early)
    residual = (early[:, 1] - line.at_zero - line.slope * early[:, 0]) * 1e3
    off = (late[:, 1] - line.at_zero - line.slope * late[:, 0]) * 1e3
    yield (
        f"\nTo step {LAST_ON_THE_LINE} c_low lies on one line with c_high, to "
        f"{np.median(np.abs(residual)):.1f} thousandths in the median and "
        f"{np.abs(residual).max():.1f} at most; "
        f"{(residual < -0.5).sum()} of {len(residual)} steps lie more than half a thousandth below, "
        f"{(residual > 0.5).sum()} above. From then on the median distance is {np.median(np.abs(off)):.0f}."
    )
    at_06, at_3 = (0.6 - line.at_zero) / line.slope, line.at_zero + 3 * line.slope
    yield (
        f"The line has c_low = 0.6 at c_high = {at_06:.3f}, and c_low = {at_3:.3f} at c_high = 3.0. "
        f"Between both ends of Sec. 5.1, (1.2, 0.6) and (3.0, 0.9), the slope is {0.3 / 1.8:.4f}; between "
        f"(1.3, 0.6) and (3.0, 0.8) it is {0.2 / 1.7:.4f}."
    )
    share = (early[:, 0] - 1.3) / 1.7
    jumps = np.corrcoef(early[:-1, 0], early[1:, 0])[0, 1]
    yield (
        f"If each search ended at one of these two, {share.mean():.0%} of them were at the ends, and "
        f"{searches_a_step(early[:, 0], 1.3, 3.0):.0f} independent searches a step explain the jumps "
        f"(the correlation of one step with the next is {jumps:.2f})."
    )


if __name__ == "__main__":
    print("\n".join(report()))
