"""matplotlib artists of a report's plots: a run's curve by step, a distribution by ratio, Eq. 6's prediction.

``line_of`` computes a curve (``Line``); ``draw_line`` and ``draw_distribution`` draw on axes. A curve has a
thin line of single values and a thick one of their moving mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import NullLocator

from bapo_megatron.commands.report.data import RunRecord, Series, moving_mean, smoothing_window
from bapo_megatron.commands.report.panels import Panel
from bapo_megatron.commands.report.series import (
    FEW_TOKENS,
    RATIO_CENTRES,
    prediction,
    ratio_profile,
    ratio_tokens,
)

MOST_UPDATES = 2000
"""Above this many updates the thin line is by step: updates would fill a solid block."""
_FEW_POINTS = 8
"""Curves with fewer points mark each; a one-point line is invisible otherwise."""


@dataclass(frozen=True)
class Line:
    """Drawable curve of a run: single values, and their moving mean."""

    thin: Series
    """Values of single updates or steps."""
    thick: Series
    """Moving mean by step."""

    def shown(self, panel: Panel) -> np.ndarray:
        """Return the values that the panel's axis must show."""
        thin, thick = (line.value[np.isfinite(line.value)] for line in (self.thin, self.thick))
        return np.concatenate([thin if panel.y_scale == "spikes" else _without_outliers(thin), thick])


def line_of(run: RunRecord, metric: str) -> Line:
    """Return a metric's values by update and their moving mean by step. Without values by update, or with
    more than ``MOST_UPDATES``, the values are by step, too."""
    mean, raw = run.by_step(metric), run.by_update(metric)
    if not np.isfinite(raw.value).any() or len(raw.value) > MOST_UPDATES:
        raw = mean
    return Line(raw, Series(mean.step, moving_mean(mean.value, smoothing_window(len(mean.value)))))


def draw_line(axes: Any, line: Line, colour: str, style: Any) -> None:
    """Draw the values as a thin line and their moving mean as a thick one."""
    known = np.isfinite(line.thick.value)
    thick = {"color": colour, "linestyle": style, "linewidth": 2, **_markers(known)}
    axes.plot(line.thin.step, line.thin.value, color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(line.thick.step, line.thick.value, **thick)


def _markers(known: np.ndarray) -> dict[str, Any]:
    """Return style options that mark all points of a short curve, or the isolated points of a longer one."""
    if len(known) < _FEW_POINTS:
        return {"marker": "o"}
    alone = known & ~np.insert(known[:-1], 0, False) & ~np.append(known[1:], False)
    return {"marker": "o", "markersize": 4, "markevery": alone.tolist()} if alone.any() else {}


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


def draw_distribution(axes: Any, panel: Panel, runs: Sequence[tuple[RunRecord, str]]) -> bool:
    """Draw ``panel`` for (run, colour) pairs; return whether any run has measured it."""
    if panel.distribution == "prediction":
        drawn = [_scatter(axes, run, colour) for run, colour in runs]
        axes.set_xlabel("predicted change, any unit")
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        return any(drawn)
    drawn = [_profile(axes, run, colour, str(panel.distribution)) for run, colour in runs]
    axes.set_xscale("log")
    axes.set_xticks(list(_TICKS), list(_TICKS.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.4, 4.0)
    axes.set_xlabel("importance ratio")
    if any(drawn):
        axes.set_ylim(bottom=0)
    return any(drawn)


def _profile(axes: Any, run: RunRecord, colour: str, what: str) -> bool:
    profile, tokens = ratio_profile(run, what), ratio_tokens(run)
    shown = np.isfinite(profile.value)
    if tokens is not None and (tokens >= FEW_TOKENS).any():
        shown &= tokens >= FEW_TOKENS
    axes.plot(profile.step[shown], profile.value[shown], "o-", color=colour, linewidth=2, markersize=4)
    return bool(shown.any())


def _scatter(axes: Any, run: RunRecord, colour: str) -> bool:
    pairs = prediction(run)
    count, every = len(pairs.predicted), 1 + len(pairs.predicted) // _MOST
    if not count:
        return False
    label = "" if pairs.correlation is None else f"correlation {pairs.correlation:.2f} of {count} points"
    if label and every > 1:
        label += f", of {every} one drawn"
    size = 9 if count > _MANY else 26
    drawn = (values[::every] for values in (pairs.predicted, pairs.measured))
    axes.scatter(*drawn, s=size, color=colour, alpha=0.45, linewidths=0, label=label or None)
    return True
