"""Matplotlib plots of a report, one per panel, and the overview image, written atomically as PNG.

``draw_panel`` writes a panel's PNG and returns it as SVG for the page; ``draw_overview`` writes the overview.
A single run's curves have their panel's colours. In a comparison each run has a colour, each curve a line
style. matplotlib loads slowly, so import this module only to draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from bapo_megatron.commands.report.data import RunRecord
from bapo_megatron.commands.report.lines import Line, draw_distribution, draw_line, line_of
from bapo_megatron.commands.report.panels import (
    NEGATIVE,
    NEUTRAL,
    OVERVIEW,
    Band,
    Curve,
    Panel,
    bands,
)
from bapo_megatron.commands.report.series import event_marks
from bapo_megatron.runtime.files import write_atomically

_INK = "#2b2f36"
_PALE_INK = "#6b7280"
_GRID = "#dfe2e7"
_OF_LINES = "#9aa1ab"
"""Colour of the lines in a comparison's legend that stand for a style."""
STYLE: dict[str, Any] = {
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
    "svg.hashsalt": "report",  # same run, same bytes
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
"""Colours of compared runs, distinct with any colour vision (Okabe and Ito)."""
_DASHED = (0, (3, 1.2))
LINES: tuple[Any, ...] = ("-", _DASHED, (0, (1, 1.2)))
"""Line styles of the curves in a compared plot: solid, dashed, dotted."""
_DASHES, _DOTS = (0, (4, 3)), (0, (1, 2))
"""Line styles of marks: resumes, and losses or targets."""
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11.5, "fontweight": "bold"}
_SPIKE_RATIO = 20
"""Above this ratio of maximum to median the axis is logarithmic."""
_RATIO_TICKS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10)
_SHORT_NAME, _LONGEST_LINE = 20, 54
"""Characters of the longest name that allows two legend columns, and of one line of a name."""
_LINE_INCHES = 0.18
"""Height of a legend line."""


def draw_panel(panel: Panel, runs: Sequence[RunRecord], folder: Path) -> bytes:
    """Draw a panel as a PNG with legend into ``folder``; return it as an SVG for the page."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        _draw(figure.subplots(), panel, runs)
        if len(handles := [*_run_handles(runs), *_line_handles(panel, runs)]) > 1:
            _add_legend(figure, handles)
        write_png(figure, folder / f"{panel.file}.png", 200)
        figure.set_layout_engine("none")  # the layout is final; computing it again is slow
        vector = BytesIO()
        figure.savefig(vector, format="svg", metadata={"Date": None}, transparent=True)
        return vector.getvalue()


def draw_overview(run: RunRecord, path: Path) -> None:
    """Draw the overview panels as one PNG with two rows, for a README."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 7), layout="constrained")
        for axes, panel in zip(figure.subplots(2, len(OVERVIEW) // 2).flat, OVERVIEW, strict=True):
            _draw(axes, panel, [run])
            if handles := _line_handles(panel, [run]):
                axes.legend(handles=handles, loc="best", fontsize=8)
        write_png(figure, path, 130)


def write_png(figure: Figure, path: Path, dpi: int) -> None:
    """Write a picture atomically; replaces a link instead of following it."""
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    write_atomically(path, picture.getvalue())


# --- the curves ----------------------------------------------------------------------------------


def _draw(axes: Any, panel: Panel, runs: Sequence[RunRecord]) -> None:
    axes.set_title(panel.title, pad=10, **TITLE)
    axes.set_ylabel(panel.y_label)
    single = len(runs) == 1
    coloured = list(zip(runs, (NEUTRAL,) if single else COLOURS, strict=False))
    if panel.distribution:
        if not draw_distribution(axes, panel, coloured):
            nothing_measured(axes)
        elif single and axes.get_legend_handles_labels()[1]:
            axes.legend(loc="best", handlelength=0.5)
        return
    axes.set_xlabel("step")
    drawn: list[Line] = []
    for run, colour in coloured:
        for curve, style in _styled(panel, runs):
            drawn.append(line_of(run, curve.metric))
            draw_line(axes, drawn[-1], curve.colour if single else colour, style)
        _mark_events(axes, run, *((_PALE_INK, NEGATIVE) if single else (colour, colour)))
    shaded = bands(panel, runs[0]) if single else []
    if _frame(axes, panel, runs, drawn, shaded):
        for band in shaded:
            draw_band(axes, band)


def _styled(panel: Panel, runs: Sequence[RunRecord]) -> Iterator[tuple[Curve, Any]]:
    """Yield the curves of a panel to draw for ``runs``, and their line styles."""
    if len(runs) == 1:
        yield from ((curve, _DASHED if curve.dashed else "-") for curve in panel.curves)
        return
    places = range(len(panel.curves)) if panel.compared is None else panel.compared
    yield from zip((panel.curves[place] for place in places), LINES, strict=False)


def _frame(
    axes: Any, panel: Panel, runs: Sequence[RunRecord], lines: Sequence[Line], shaded: list[Band]
) -> bool:
    """Set both axes for the drawn lines; return False, with a note in the plot, if nothing was measured."""
    first, last = min(run.first_step for run in runs), max(run.step_numbers.max() for run in runs)
    margin = max((last - first) * 0.02, 0.5)
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    values = np.concatenate([line.shown(panel) for line in lines])
    if len(values):
        frame_values(axes, panel, values, shaded)
    else:
        nothing_measured(axes)
    return bool(len(values))


# --- the legend ----------------------------------------------------------------------------------


def _add_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Add a legend below the axes. The figure grows by its lines, so long names do not squeeze the plot."""
    labels = [str(handle.get_label()) for handle in handles]
    columns = 2 if max(map(len, labels)) <= _SHORT_NAME else 1
    lines = -(-sum(label.count("\n") + 1 for label in labels) // columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + _LINE_INCHES * max(0, lines - 2))
    figure.legend(handles=handles, fontsize=8.5, loc="outside lower left", ncols=columns, borderpad=0)


def _run_handles(runs: Sequence[RunRecord]) -> list[Line2D]:
    if len(runs) == 1:
        return []
    return [
        Line2D([], [], color=colour, linewidth=2, label=_drawable(run.name))
        for run, colour in zip(runs, COLOURS, strict=False)
    ]


def _drawable(name: str) -> str:
    """Return a name in wrapped lines, as text: dollar signs would make it a formula."""
    return "\n".join(wrap(name, _LONGEST_LINE, break_on_hyphens=False)).replace("$", r"\$")


def _line_handles(panel: Panel, runs: Sequence[RunRecord]) -> list[Line2D]:
    styled = list(_styled(panel, runs))
    if len(styled) < 2:
        return []
    return [
        Line2D(
            [], [], color=_OF_LINES if runs[1:] else one.colour, linewidth=2, linestyle=line, label=one.label
        )
        for one, line in styled
    ]


# --- axes ---------------------------------------------------------------------------------------


def _mark_events(axes: Any, run: RunRecord, resume: str, loss: str) -> None:
    for mark in event_marks(run):
        colour, line = (loss, _DOTS) if mark.loss else (resume, _DASHES)
        axes.axvline(mark.position, color=colour, linewidth=0.8, linestyle=line, alpha=0.7)


def draw_band(axes: Any, band: Band) -> None:
    """Shade a range, labelled above on the left, or draw a line, labelled below on the right."""
    is_line = band.low == band.high
    if is_line:
        axes.axhline(band.low, color=band.colour, linewidth=1, linestyle=_DOTS)
    else:
        axes.axhspan(band.low, band.high, color=band.colour, alpha=0.09, linewidth=0)
    axes.annotate(
        band.label,
        (1 if is_line else 0, band.high),
        xycoords=("axes fraction", "data"),
        xytext=(-3, -2) if is_line else (3, 2),
        textcoords="offset points",
        ha="right" if is_line else "left",
        va="top" if is_line else "bottom",
        fontsize=8.5,
        color=band.colour,
    )


def nothing_measured(axes: Any) -> None:
    """Write "not measured" into empty axes."""
    axes.set_yticks([])
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_PALE_INK)


def frame_values(axes: Any, panel: Panel, values: np.ndarray, shaded: list[Band]) -> None:
    """Set limits, scale and tick labels of the vertical axis."""
    if panel.y_scale == "spikes" and values.min() > 0 and values.max() > _SPIKE_RATIO * np.median(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        return
    ends = [values.min(), values.max(), *(end for band in shaded for end in (band.low, band.high))]
    low, high = min(ends), max(ends)
    if panel.y_scale == "ratio" and low > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(_RATIO_TICKS))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        axes.set_ylim(low / 1.12, high * 1.15)
        return
    axes.yaxis.set_major_formatter(FuncFormatter(_percent if panel.y_scale == "percent" else _plain))
    from_zero = panel.y_scale in ("from_zero", "percent", "spikes") and low >= 0
    bottom = 0.0 if from_zero else low
    margin = 0.1 * (high - bottom) or 0.1 * abs(high) or 1.0
    axes.set_ylim(bottom if from_zero else bottom - margin, high + margin)


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:g}"


def _percent(value: float, _position: int | None = None) -> str:
    return f"{100 * value:g}%"
