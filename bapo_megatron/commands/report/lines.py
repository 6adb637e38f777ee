"""Lines of a report's plots: what a curve of a run is drawn as, and its artists.

Single values are thin, their moving mean is thick, and pale where it is of few tokens. Lines of more points
than pixels are thinned. Used by ``page.py`` and ``plots.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo_megatron.commands.report.data import RunRecord, Series, moving_mean
from bapo_megatron.commands.report.panels import Curve, Panel
from bapo_megatron.commands.report.series import FEW_TOKENS, tokens_averaged

MOST_UPDATES = 2000
"""The number of updates above which the thin line follows the steps, as updates would make a solid block."""
_MOST_POINTS = 2000
"""The number of points of a line above which it is thinned: two for each of its pixels in the PNG."""
_FEW_POINTS = 8
"""The number of points below which a curve shows each; a line of one cannot be seen without."""


@dataclass(frozen=True)
class Line:
    """A curve of a run as it is drawn: thin single values, and their moving mean. Made by ``line_of``."""

    thin: Series
    """Single updates, or single steps."""
    thick: Series
    """The moving mean by step, NaN where it is of few tokens."""
    pale: Series
    """The rest of the moving mean, and the points where it meets the thick line."""
    shown: np.ndarray
    """The values that the axis must show."""


def line_of(run: RunRecord, curve: Curve, panel: Panel) -> Line:
    """The values of a metric by update, and their moving mean by step.

    By step too where there are no values by update, or too many.
    """
    mean, raw = run.by_step(curve.metric), run.by_update(curve.metric)
    window = smoothing_window(len(mean.value))
    if not np.isfinite(raw.value).any() or len(raw.value) > MOST_UPDATES:
        raw = mean
    smooth, few = Series(mean.step, moving_mean(mean.value, window)), np.zeros(len(mean.value), dtype=bool)
    table = run.updates or run.steps
    tokens = tokens_averaged(table, curve.share) if curve.share else None
    if tokens is not None:
        values, at = table.column(curve.metric), table.column("step")
        smooth, few = _weighted(mean.step, at, values, tokens, window)
        if raw is mean:
            by_step, of_few = _weighted(mean.step, at, values, tokens, 1)
            raw = Series(mean.step, np.where(of_few, np.nan, by_step.value))
        else:
            raw = Series(raw.step, np.where(tokens >= FEW_TOKENS, values, np.nan))
    thick = np.where(few, np.nan, smooth.value)
    beside = few | np.append(few[1:], False) | np.insert(few[:-1], 0, False)
    pale_values = np.where(beside, smooth.value, np.nan)
    single, ends = raw.value[np.isfinite(raw.value)], thick[np.isfinite(thick)]
    if not len(ends):
        ends = smooth.value[np.isfinite(smooth.value)]
    shown = single if panel.y_scale == "spikes" else _without_outliers(single)
    if not panel.thin:
        raw, shown = Series(np.zeros(0), np.zeros(0)), np.zeros(0)
    firm, pale = thinned(Series(smooth.step, thick)), thinned(Series(smooth.step, pale_values))
    return Line(thinned(raw), firm, pale, np.concatenate([shown, ends]))


def thinned(series: Series) -> Series:
    """The smallest and the largest of every few neighbouring points, where there are more than pixels.

    No extreme value is lost, and a gap stays one where it is as long as that.
    """
    if len(series.value) <= _MOST_POINTS:
        return series
    size = -(-len(series.value) // (_MOST_POINTS // 2))
    padded = np.pad(series.value, (0, -len(series.value) % size), constant_values=np.nan).reshape(-1, size)
    lowest = np.where(np.isnan(padded), np.inf, padded).argmin(axis=1)
    highest = np.where(np.isnan(padded), -np.inf, padded).argmax(axis=1)
    kept = np.unique(np.arange(len(padded)) * size + np.stack([lowest, highest]))
    return Series(series.step[kept], series.value[kept])


def _weighted(
    steps: np.ndarray, at: np.ndarray, values: np.ndarray, tokens: np.ndarray, window: int
) -> tuple[Series, np.ndarray]:
    """The moving mean by step over all tokens of its steps, and where these are few.

    ``at`` is the step of each value.
    """
    order = np.argsort(steps, kind="stable")
    place = order[np.searchsorted(steps, at, sorter=order).clip(max=len(steps) - 1)]
    counted = (steps[place] == at) & np.isfinite(values)
    place, weights, values = place[counted], tokens[counted], values[counted]
    box = np.ones(window)
    sums, counts = (
        np.convolve(np.bincount(place, found, len(steps)), box)[window // 2 :][: len(steps)]
        for found in (weights * values, weights)
    )
    means = np.full(len(steps), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return Series(steps, means), (counts > 0) & (counts < FEW_TOKENS)


def draw_line(axes: Any, line: Line, colour: str, style: Any, label: str | None = None) -> list[Any]:
    """Draw a thin line of the measured values, and a thick one of their moving mean, pale where it is of few
    tokens; returns the artists."""
    known = np.isfinite(line.thick.value).any() or np.isfinite(line.pale.value).any()
    return [
        *axes.plot(line.thin.step, line.thin.value, color=colour, linewidth=0.8, alpha=0.3),
        *axes.plot(
            line.pale.step,
            line.pale.value,
            color=colour,
            linewidth=1.2,
            alpha=0.4,
            linestyle=style,
            **_markers(line.pale),
        ),
        *axes.plot(
            line.thick.step,
            line.thick.value,
            color=colour,
            label=label if known else None,
            linewidth=2,
            linestyle=style,
            **_markers(line.thick),
        ),
    ]


def _markers(series: Series) -> dict[str, Any]:
    """Marks of all points of a short curve; of a longer one, of points without a neighbour, as a line between
    gaps is none."""
    if len(series.step) < _FEW_POINTS:
        return {"marker": "o"}
    known = np.isfinite(series.value)
    alone = known & ~np.insert(known[:-1], 0, False) & ~np.append(known[1:], False)
    return {"marker": "o", "markersize": 4, "markevery": alone.tolist()} if alone.any() else {}


def mark_cut_offs(axes: Any, line: Line, colour: str) -> list[Any]:
    """Mark with triangles at the edge where a line leaves the axes; returns the artists."""
    low, high = axes.get_ylim()
    artists: list[Any] = []
    for series in (line.thin, line.pale):
        for beyond, edge, shape in ((series.value > high, 1, "^"), (series.value < low, 0, "v")):
            if beyond.any():
                artists += axes.plot(
                    series.step[beyond],
                    np.full(beyond.sum(), edge),
                    linestyle="none",
                    marker=shape,
                    markersize=4,
                    color=colour,
                    alpha=0.8,
                    markeredgewidth=0,
                    transform=axes.get_xaxis_transform(),
                    clip_on=False,
                )
    return artists


def smoothing_window(steps: int) -> int:
    """The window of the moving mean, in steps: odd, about a twelfth of the run, at most 25."""
    return 2 * min(steps // 24, 12) + 1


def _without_outliers(values: np.ndarray) -> np.ndarray:
    """The values without the outermost 1%, so that one outlier does not flatten a whole curve."""
    if len(values) < 100:
        return values
    low, high = np.percentile(values, [0.5, 99.5])
    ordinary: np.ndarray = values[(values >= low) & (values <= high)]
    return ordinary
