"""matplotlib artists of a report's plots: a run's curve by step, a distribution by ratio, Eq. 6's prediction.

``line_of`` computes a curve (``Line``); ``draw_line`` and ``draw_distribution`` draw on axes and return the
artists. A curve has a thin line of single values and a thick one of their moving mean, which is pale where it
averages fewer than ``FEW_TOKENS`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import NullLocator

from bapo_megatron.commands.report.data import RunRecord, Series, moving_mean, smoothing_window
from bapo_megatron.commands.report.panels import Curve, Panel
from bapo_megatron.commands.report.series import (
    FEW_TOKENS,
    RATIO_CENTRES,
    prediction,
    ratio_profile,
    ratio_tokens,
    tokens_averaged,
)

MOST_UPDATES = 2000
"""Above this many updates the thin line is by step: updates would fill a solid block."""
_FEW_POINTS = 8
"""Curves with fewer points mark each; a one-point line is invisible otherwise."""


@dataclass(frozen=True)
class Line:
    """Drawable curve of a run: single values, their moving mean, and its parts with few tokens."""

    thin: Series
    """Values of single updates or steps."""
    thick: Series
    """Moving mean by step, NaN where few tokens are behind it."""
    pale: Series
    """Rest of the moving mean, and the points where it meets the thick line."""
    shown: np.ndarray
    """Values that the axis must show."""


def line_of(run: RunRecord, curve: Curve, panel: Panel) -> Line:
    """Return a metric's values by update and their moving mean by step. Without values by update, or with
    more than ``MOST_UPDATES``, the values are by step, too. Values of few tokens are left out."""
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
    firm, pale = Series(smooth.step, thick), Series(smooth.step, pale_values)
    return Line(raw, firm, pale, np.concatenate([shown, ends]))


def _weighted(
    steps: np.ndarray, at: np.ndarray, values: np.ndarray, tokens: np.ndarray, window: int
) -> tuple[Series, np.ndarray]:
    """Return the token-weighted moving mean by step, and a mask of the steps with few tokens behind it."""
    order = np.argsort(steps, kind="stable")
    place = order[np.searchsorted(steps, at, sorter=order).clip(max=len(steps) - 1)]
    counted = (steps[place] == at) & np.isfinite(values)
    place, weights, values = place[counted], tokens[counted], values[counted]
    box = np.ones(window)
    sums, counts = (
        np.convolve(np.bincount(place, summed, len(steps)), box)[window // 2 :][: len(steps)]
        for summed in (weights * values, weights)
    )
    means = np.full(len(steps), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return Series(steps, means), (counts > 0) & (counts < FEW_TOKENS)


def draw_line(axes: Any, line: Line, colour: str, style: Any, label: str | None = None) -> list[Any]:
    """Draw the values as a thin line and their moving mean as a thick one, pale where few tokens are behind
    it; return the artists."""
    known = np.isfinite(line.thick.value).any() or np.isfinite(line.pale.value).any()
    pale = {"color": colour, "linestyle": style, "linewidth": 1.2, "alpha": 0.4, **_markers(line.pale)}
    thick = {"color": colour, "linestyle": style, "linewidth": 2, **_markers(line.thick)}
    return [
        *axes.plot(line.thin.step, line.thin.value, color=colour, linewidth=0.8, alpha=0.3),
        *axes.plot(line.pale.step, line.pale.value, **pale),
        *axes.plot(line.thick.step, line.thick.value, label=label if known else None, **thick),
    ]


def _markers(series: Series) -> dict[str, Any]:
    """Return style options that mark all points of a short curve, or the isolated points of a longer one."""
    if len(series.step) < _FEW_POINTS:
        return {"marker": "o"}
    known = np.isfinite(series.value)
    alone = known & ~np.insert(known[:-1], 0, False) & ~np.append(known[1:], False)
    return {"marker": "o", "markersize": 4, "markevery": alone.tolist()} if alone.any() else {}


def mark_cut_offs(axes: Any, line: Line, colour: str) -> list[Any]:
    """Mark with triangles where a line leaves the axes; return the artists."""
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


def _without_outliers(values: np.ndarray) -> np.ndarray:
    """Return the values without the outermost 1%, so that one outlier does not flatten the curve."""
    if len(values) < 100:
        return values
    low, high = np.percentile(values, [0.5, 99.5])
    ordinary: np.ndarray = values[(values >= low) & (values <= high)]
    return ordinary


# --- distributions ---------------------------------------------------------------------------------

_TICKS = {RATIO_CENTRES[0]: "<0.5", 0.7: "0.7", 1.0: "1", 1.4: "1.4", 2.0: "2", RATIO_CENTRES[-1]: "≥3"}
"""The outer bins are open-ended."""
_MANY = 200
"""Above this many points they are drawn small."""
_MOST = 2000
"""Above this many points only every second, third, ... is drawn."""


def draw_distribution(axes: Any, panel: Panel, runs: Sequence[tuple[RunRecord, str]]) -> list[list[Any]]:
    """Draw ``panel`` for (run, colour) pairs; return each run's artists, none if not measured."""
    if panel.distribution == "prediction":
        artists = [_scatter(axes, run, colour) for run, colour in runs]
        axes.set_xlabel("predicted change, any unit")
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        return artists
    artists = [_profile(axes, run, colour, str(panel.distribution)) for run, colour in runs]
    axes.set_xscale("log")
    axes.set_xticks(list(_TICKS), list(_TICKS.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.4, 4.0)
    axes.set_xlabel("importance ratio")
    if any(artists):
        axes.set_ylim(bottom=0)
    return artists


def _profile(axes: Any, run: RunRecord, colour: str, what: str) -> list[Any]:
    profile, tokens = ratio_profile(run, what), ratio_tokens(run)
    known = np.isfinite(profile.value)
    if not known.any():
        return []
    enough = known if tokens is None else known & (tokens >= FEW_TOKENS)
    pale = known & ~enough
    line = axes.plot(profile.step[known], profile.value[known], "-", color=colour, linewidth=1, alpha=0.35)
    firm = axes.plot(
        profile.step, np.where(enough, profile.value, np.nan), "o-", color=colour, linewidth=2, ms=4
    )
    hollow = axes.plot(
        profile.step[pale], profile.value[pale], "o", color=colour, markerfacecolor="none", alpha=0.45, ms=5
    )
    return [*line, *firm, *hollow]


def _scatter(axes: Any, run: RunRecord, colour: str) -> list[Any]:
    pairs = prediction(run)
    if not len(pairs.predicted):
        return []
    count, every = len(pairs.predicted), 1 + len(pairs.predicted) // _MOST
    label = "" if pairs.correlation is None else f"correlation {pairs.correlation:.2f} of {count} points"
    if label and every > 1:
        label += f", of {every} one drawn"
    size = 9 if count > _MANY else 26
    drawn = (values[::every] for values in (pairs.predicted, pairs.measured))
    points = axes.scatter(*drawn, s=size, color=colour, alpha=0.45, linewidths=0)
    points.set_label(label)
    return [points]
