"""Comparison plots of several runs: of each panel a PNG, and as SVG its axes and a layer for each run.

Slow to import (matplotlib): ``comparison.py`` does so only when it draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bapo_megatron.commands.report.data import RunRecord
from bapo_megatron.commands.report.distributions import DISTRIBUTIONS, Drawn, draw_distribution
from bapo_megatron.commands.report.panels import REFERENCE, Band, Curve, Panel, bands
from bapo_megatron.commands.report.plots import (
    STYLE,
    TITLE,
    Line,
    draw_band,
    draw_line,
    frame_steps,
    frame_values,
    line_of,
    mark_cut_offs,
    nothing_measured,
    write_png,
)
from bapo_megatron.commands.report.series import event_marks

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
"""The colours of the runs, distinct with any kind of colour vision (Okabe and Ito)."""

LINES: tuple[Any, ...] = ("-", (0, (3, 1.2)), (0, (1, 1.2)))
"""The line styles of the curves of a plot: solid, dashed, dotted."""


@dataclass(frozen=True)
class Layers:
    """A comparison plot as transparent SVG layers of one size: the axes, and the curves of each run.

    The page lays them over each other, and can hide a run.
    """

    axes: bytes
    runs: list[bytes]


def curves_of(panel: Panel) -> list[Curve]:
    """The curves of a panel that a comparison draws."""
    chosen = range(len(panel.curves)) if panel.compared is None else panel.compared
    return [panel.curves[index] for index in chosen]


def draw_comparison(panel: Panel, runs: Sequence[Drawn], folder: Path) -> Layers:
    """Draw a panel as a PNG with a legend into ``folder``; returns its layers for the page."""
    with matplotlib.rc_context(STYLE):
        figure, axes, _ = _figure(panel, runs)
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.2), "ncols": 2, "borderpad": 0}
        axes.legend(handles=[*_run_handles(runs), *_line_handles(panel)], fontsize=8.5, **place)
        write_png(figure, folder / f"{panel.file}.png", 200)
        return _layers(*_figure(panel, runs))


def _run_handles(runs: Sequence[Drawn]) -> list[Line2D]:
    return [Line2D([], [], color=colour, linewidth=2, label=run.name) for run, colour in runs]


def _line_handles(panel: Panel) -> list[Line2D]:
    """Legend entries for the line styles, if there is more than one."""
    curves = curves_of(panel)
    if len(curves) < 2:
        return []
    return [
        Line2D([], [], color="#9aa1ab", linewidth=2, linestyle=line, label=curve.label)
        for curve, line in zip(curves, LINES, strict=False)
    ]


def _layers(figure: Figure, axes: Any, artists: list[list[Any]]) -> Layers:
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # The same place for the axes in every layer.
    for artist in (artist for of_run in artists for artist in of_run):
        artist.set_visible(False)
    base = _svg(figure)
    axes.set_axis_off()
    for of_all in (axes.title, axes._left_title, *axes.texts, *axes.patches, *axes.lines):
        of_all.set_visible(False)
    layers = []
    for of_run in artists:
        for artist in of_run:
            artist.set_visible(True)
        layers.append(_svg(figure))
        for artist in of_run:
            artist.set_visible(False)
    return Layers(base, layers)


def _svg(figure: Figure) -> bytes:
    vector = BytesIO()
    figure.savefig(vector, format="svg", metadata={"Date": None}, transparent=True)
    return vector.getvalue()


def _figure(panel: Panel, runs: Sequence[Drawn]) -> tuple[Figure, Any, list[list[Any]]]:
    """The figure and its axes, and the artists of each run."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(panel.title, pad=10, **TITLE)
    axes.set_ylabel(panel.y_label)
    if panel in DISTRIBUTIONS:
        artists = draw_distribution(axes, panel, runs)
        if not any(artists):
            nothing_measured(axes)
        return figure, axes, artists
    axes.set_xlabel("step")
    drawn = [_draw_run(axes, panel, run, colour) for run, colour in runs]
    frame_steps(axes, [run for run, _ in runs])
    values = np.concatenate([line.shown for _, lines in drawn for line in lines])
    artists = [found for found, _ in drawn]
    if len(values):
        shaded = common_bands(panel, [run for run, _ in runs])
        frame_values(axes, panel, values, shaded)
        for band in shaded:
            draw_band(axes, band)
        for (found, lines), (_, colour) in zip(drawn, runs, strict=True):
            found += [mark for line in lines for mark in mark_cut_offs(axes, line, colour)]
    else:
        nothing_measured(axes)
    return figure, axes, artists


def common_bands(panel: Panel, runs: Sequence[RunRecord]) -> list[Band]:
    """The bands of a plot (ranges and target), if they are equal for all runs that have any."""
    found = [of_run for of_run in (bands(panel, run) for run in runs) if of_run]
    if not found or any(of_run != found[0] for of_run in found):
        return []
    return [replace(band, colour=REFERENCE) for band in found[0]]


def _draw_run(axes: Any, panel: Panel, run: RunRecord, colour: str) -> tuple[list[Any], list[Line]]:
    """Draw one run's curves; returns their artists and lines."""
    artists: list[Any] = []
    lines = [line_of(run, curve, panel) for curve in curves_of(panel)]
    for line, style in zip(lines, LINES, strict=False):
        artists += draw_line(axes, line, colour, style)
    for mark in event_marks(run):
        dashes = (0, (1, 2)) if mark.loss else (0, (4, 3))
        artists.append(axes.axvline(mark.position, color=colour, linewidth=0.9, linestyle=dashes, alpha=0.7))
    return artists, lines
