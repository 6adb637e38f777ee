"""Matplotlib plots of a report: one for each panel, and the overview image, written atomically as PNG.

Slow to import: ``page.py`` does so only when it draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from bapo_megatron.commands.report.data import RunRecord, Series, moving_mean
from bapo_megatron.commands.report.distributions import DISTRIBUTIONS, draw_distribution
from bapo_megatron.commands.report.panels import (
    NEGATIVE,
    NEUTRAL,
    OVERVIEW,
    PANELS,
    Band,
    Curve,
    Panel,
    bands,
)
from bapo_megatron.commands.report.series import FEW_TOKENS, event_marks, tokens_averaged
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.jsonl_log import Row

_INK = "#2b2f36"
_PALE_INK = "#6b7280"
_GRID = "#dfe2e7"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _PALE_INK,
    "axes.edgecolor": "#c3c8d0",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _PALE_INK,
    "ytick.color": _PALE_INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "svg.hashsalt": "report",  # Same run, same bytes.
}
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11.5, "fontweight": "bold"}
_SPIKE_RATIO = 20
"""The ratio of maximum to median above which the axis is logarithmic."""
MOST_UPDATES = 2000
"""The number of updates above which the thin line follows the steps, as updates would make a solid block."""
_FEW_POINTS = 8
"""The number of points below which a curve shows each; a line of one cannot be seen without."""
_RATIO_TICKS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10)
_PLAIN_TITLE_PAD, _LEGEND_TITLE_PAD = 10, 25
"""Points between a title and its axes, without and with a legend between them."""
_TWO_ROWS, _TWO_ROWS_TITLE_PAD = 4, 33
"""The number of curves whose legend has two rows, and the points between title and axes then."""


def _title_pad(panel: Panel) -> int:
    if len(panel.curves) == _TWO_ROWS:
        return _TWO_ROWS_TITLE_PAD
    return _LEGEND_TITLE_PAD if len(panel.curves) > 1 else _PLAIN_TITLE_PAD


def draw_panels(run: RunRecord, folder: Path) -> dict[str, bytes]:
    """Draw each panel as a PNG into ``folder``; returns the SVGs for the page by file name."""
    return {panel.file: _save_panel(panel, run, folder) for panel in (*PANELS, *DISTRIBUTIONS)}


def draw_overview(run: RunRecord, path: Path) -> None:
    """Draw the overview panels as one PNG of two rows, for a README."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 7), layout="constrained")
        for axes, panel in zip(figure.subplots(2, len(OVERVIEW) // 2).flat, OVERVIEW, strict=True):
            _draw(axes, panel, run)
            axes.set_title(panel.title, pad=_LEGEND_TITLE_PAD, **TITLE)  # Equal, so that titles line up.
        write_png(figure, path, 130)


def write_png(figure: Figure, path: Path, dpi: int) -> None:
    """Write a picture beside the page atomically, and not through a link."""
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    write_atomically(path, picture.getvalue())


def smoothing_window(steps: int) -> int:
    """The window of the moving mean, in steps: odd, about a twelfth of the run, at most 25."""
    return 2 * min(steps // 24, 12) + 1


def _save_panel(panel: Panel, run: RunRecord, folder: Path) -> bytes:
    vector = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        (_draw_distribution if panel in DISTRIBUTIONS else _draw)(figure.subplots(), panel, run)
        write_png(figure, folder / f"{panel.file}.png", 200)
        figure.savefig(vector, format="svg", metadata={"Date": None}, transparent=True)
    return vector.getvalue()


def _draw_distribution(axes: Any, panel: Panel, run: RunRecord) -> None:
    axes.set_title(panel.title, pad=_PLAIN_TITLE_PAD, **TITLE)
    axes.set_ylabel(panel.y_label)
    [artists] = draw_distribution(axes, panel, [(run, NEUTRAL)])
    if not artists:
        nothing_measured(axes)
    elif panel.file == "entropy_prediction" and artists[0].get_label():
        axes.legend(loc="best", handlelength=0.5)


def _draw(axes: Any, panel: Panel, run: RunRecord) -> None:
    lines = [(curve, line_of(run, curve, panel)) for curve in panel.curves]
    for curve, line in lines:
        draw_line(axes, line, curve.colour, (0, (3, 1.2)) if curve.dashed else "-", curve.label)
    values = np.concatenate([line.shown for _, line in lines])
    axes.set_title(panel.title, pad=_title_pad(panel), **TITLE)
    axes.set_xlabel("step")
    axes.set_ylabel(panel.y_label)
    frame_steps(axes, [run])
    if len(values):
        shaded = bands(panel, run)
        frame_values(axes, panel, values, shaded)
        for curve, line in lines:
            mark_cut_offs(axes, line, curve.colour)
        _annotate(axes, panel, run, shaded)
    else:
        nothing_measured(axes)


@dataclass(frozen=True)
class Line:
    """A curve of a run as it is drawn: thin single values, and their moving mean."""

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
    rows = run.updates or run.steps
    tokens = tokens_averaged(rows, curve.share) if curve.share else None
    if tokens is not None:
        values = run.by_update(curve.metric).value if run.updates else mean.value
        smooth, few = _weighted(mean.step, rows, values, tokens, window)
        if raw is mean:
            by_step, of_few = _weighted(mean.step, rows, values, tokens, 1)
            raw = Series(mean.step, np.where(of_few, np.nan, by_step.value))
        else:
            raw = Series(raw.step, np.where(tokens >= FEW_TOKENS, values, np.nan))
    thick = np.where(few, np.nan, smooth.value)
    beside = few | np.append(few[1:], False) | np.insert(few[:-1], 0, False)
    pale = np.where(beside, smooth.value, np.nan)
    firm, ends = raw.value[np.isfinite(raw.value)], thick[np.isfinite(thick)]
    if not len(ends):
        ends = smooth.value[np.isfinite(smooth.value)]
    shown = firm if panel.y_scale == "spikes" else _without_outliers(firm)
    if not panel.thin:
        raw, shown = Series(np.zeros(0), np.zeros(0)), np.zeros(0)
    return Line(raw, Series(smooth.step, thick), Series(smooth.step, pale), np.concatenate([shown, ends]))


def _weighted(
    steps: np.ndarray, rows: Sequence[Row], values: np.ndarray, tokens: np.ndarray, window: int
) -> tuple[Series, np.ndarray]:
    """The moving mean over all tokens of its steps, and where these are few."""
    place = {step: index for index, step in enumerate(steps)}
    sums, counts = np.zeros(len(steps)), np.zeros(len(steps))
    for row, value, count in zip(rows, values, tokens, strict=True):
        if row["step"] in place and np.isfinite(value):
            sums[place[row["step"]]] += count * value
            counts[place[row["step"]]] += count
    box = np.ones(window)
    sums, counts = (np.convolve(found, box)[window // 2 :][: len(steps)] for found in (sums, counts))
    means = np.full(len(steps), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return Series(steps, means), (counts > 0) & (counts < FEW_TOKENS)


def draw_line(axes: Any, line: Line, colour: str, style: Any, label: str | None = None) -> list[Any]:
    """Draw a thin line of the measured values, and a thick one of their moving mean, pale where it is of few
    tokens; returns the artists."""
    marker = "o" if len(line.thick.step) < _FEW_POINTS else None
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
            marker=marker,
        ),
        *axes.plot(
            line.thick.step,
            line.thick.value,
            color=colour,
            label=label if known else None,
            linewidth=2,
            linestyle=style,
            marker=marker,
        ),
    ]


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


def _annotate(axes: Any, panel: Panel, run: RunRecord, shaded: list[Band]) -> None:
    for band in shaded:
        draw_band(axes, band)
    for mark in event_marks(run):
        colour, line = (NEGATIVE, (0, (1, 2))) if mark.loss else (_PALE_INK, (0, (4, 3)))
        axes.axvline(mark.position, color=colour, linewidth=0.8, linestyle=line, alpha=0.7)
    if len(panel.curves) > 1:
        crowded = len(panel.curves) > 3
        legend = axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1.01),
            ncols=len(panel.curves) if len(panel.curves) != _TWO_ROWS else 2,
            borderpad=0.2,
            borderaxespad=0,
            handlelength=2.2 if any(curve.dashed for curve in panel.curves) else 1.2,
            columnspacing=0.8 if crowded else 1.2,
            labelspacing=0.1,
            fontsize=7.5 if crowded else 9,
        )
        for handle in legend.legend_handles:
            handle.set_marker("")  # it would hide a dash
        legend.set_in_layout(False)  # the title's pad keeps its place


def draw_band(axes: Any, band: Band) -> None:
    """Shade a range, labelled above; or draw a line, labelled below, where no curve is."""
    is_line = band.low == band.high
    if is_line:
        axes.axhline(band.low, color=band.colour, linewidth=1, linestyle=(0, (1, 2)))
    else:
        axes.axhspan(band.low, band.high, color=band.colour, alpha=0.09, linewidth=0)
    axes.annotate(
        band.label,
        (1, band.high),
        xycoords=("axes fraction", "data"),
        xytext=(-3, -2 if is_line else 2),
        textcoords="offset points",
        ha="right",
        va="top" if is_line else "bottom",
        fontsize=8.5,
        color=band.colour,
    )


def nothing_measured(axes: Any) -> None:
    """Write "not measured" into empty axes."""
    axes.set_yticks([])
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_PALE_INK)


def frame_steps(axes: Any, runs: Sequence[RunRecord]) -> None:
    """Set limits and ticks of the axis of steps."""
    first, last = min(run.first_step for run in runs), max(run.step_numbers.max() for run in runs)
    margin = max((last - first) * 0.02, 0.5)
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def frame_values(axes: Any, panel: Panel, values: np.ndarray, shaded: list[Band]) -> None:
    """Set limits, scale and tick labels of the vertical axis."""
    if panel.y_scale == "spikes" and values.min() > 0 and values.max() > _SPIKE_RATIO * np.median(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        return
    ends = [values.min(), values.max(), *(end for band in shaded for end in (band.low, band.high))]
    low, high = min(ends), max(ends)
    if panel.y_scale == "ratio" and low > 0:
        _frame_ratios(axes, low, high)
        return
    axes.yaxis.set_major_formatter(FuncFormatter(_percent if panel.y_scale == "percent" else _plain))
    from_zero = panel.y_scale in ("from_zero", "percent", "spikes") and low >= 0
    bottom = 0.0 if from_zero else low
    margin = 0.1 * (high - bottom) or 0.1 * abs(high) or 1.0
    axes.set_ylim(bottom if from_zero else bottom - margin, high + margin)


def _frame_ratios(axes: Any, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(_RATIO_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_ylim(low / 1.12, high * 1.15)


def _without_outliers(values: np.ndarray) -> np.ndarray:
    """The values without the outermost 1%, so that one outlier does not flatten a whole curve."""
    if len(values) < 100:
        return values
    low, high = np.percentile(values, [0.5, 99.5])
    ordinary: np.ndarray = values[(values >= low) & (values <= high)]
    return ordinary


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:g}"


def _percent(value: float, _position: int | None = None) -> str:
    return f"{100 * value:g}%"
