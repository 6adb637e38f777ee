"""The pictures of a study: curves with their spread over seeds, and results against staleness."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from bapo_megatron.commands.report.comparison_plots import COLOURS
from bapo_megatron.commands.report.data import moving_mean
from bapo_megatron.commands.report.plots import STYLE, TITLE, nothing_measured, smoothing_window
from bapo_megatron.runtime.files import write_atomically
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import METHODS, REUSE, SETTINGS, stand_in

PANELS = {
    "reward": ("Reward", "mean reward of a response"),
    "held_out": ("Held-out problems", "share that is right"),
    "entropy": ("Policy entropy", "nats per token"),
    "grad_norm": ("Gradient norm", "L2 norm before clipping"),
    "clipped": ("Clipped tokens", "share of tokens"),
    "contribution": ("Positive contribution", "P / (P + N) of the gradient"),
}
"""A picture for each curve: title and label of the vertical axis."""

AGAINST_STALENESS = {
    "final_reward": "final reward",
    "held_out": "held-out, share right",
    "entropy_kept": "entropy, end / start",
    "drawdown": "deepest fall of the reward",
}
_LOOK: dict[str, dict[str, Any]] = {
    name: {"color": COLOURS[place % len(COLOURS)], "linestyle": "-" if place < len(COLOURS) else "--"}
    for place, name in enumerate(METHODS)
}


def draw_study(records: Sequence[ArmRecord], folder: Path, prefix: str) -> dict[str, str]:
    """Write all pictures as ``folder``/``prefix``_NAME.png; returns the title of each by its file name."""
    folder.mkdir(parents=True, exist_ok=True)
    titles = {}
    with matplotlib.rc_context(STYLE):
        for name, (title, _) in PANELS.items():
            titles[_save(_draw_curves(records, name), folder, f"{prefix}_{name}")] = title
        last = _save(draw_against_staleness(records), folder, f"{prefix}_staleness")
    return {**titles, last: "Results against staleness"}


def spread(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, smallest and largest value at each point, of those that exist; NaN where none does."""
    stacked = np.stack(curves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point without values is NaN, as it should be
        return np.nanmean(stacked, 0), np.nanmin(stacked, 0), np.nanmax(stacked, 0)


def _save(figure: Figure, folder: Path, name: str) -> str:
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    file = f"{name}.png"
    write_atomically(folder / file, picture.getvalue())
    return file


def _draw_curves(records: Sequence[ArmRecord], name: str) -> Figure:
    settings = [setting for setting in SETTINGS if any(record.setting == setting for record in records)]
    columns = 2 if len(settings) == 4 else min(len(settings), 3)
    rows = -(-len(settings) // columns)
    figure = Figure(figsize=(1.0 + 4 * columns, 0.6 + 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axes, setting in zip(grid, settings, strict=False):
        _draw_setting(axes, [record for record in records if record.setting == setting], name)
        axes.set_title(_plain(SETTINGS[setting].label), pad=8, **TITLE)
    for axes in grid[len(settings) :]:
        axes.set_visible(False)
    figure.supylabel(PANELS[name][1], fontsize=10)
    _add_legend(figure, {record.method for record in records})
    return figure


def _draw_setting(axes: Any, records: Sequence[ArmRecord], name: str) -> None:
    drawn = False
    for method in METHODS:
        runs = [record.curves[name] for record in records if record.method == method]
        if not runs or not np.isfinite(np.concatenate([run.value for run in runs])).any():
            continue
        window = 1 if name == "held_out" else smoothing_window(len(runs[0].value))
        mean, low, high = spread([moving_mean(run.value, window) for run in runs])
        marker = "o" if name == "held_out" or len(mean) < 3 else None
        style = {**_LOOK[method], "linewidth": 1.8, "marker": marker, "markersize": 4}
        axes.plot(runs[0].step, mean, **style)
        axes.fill_between(runs[0].step, low, high, color=_LOOK[method]["color"], alpha=0.12, linewidth=0)
        drawn = True
    if not drawn:
        nothing_measured(axes)
    elif name == "grad_norm":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("share of the run")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def draw_against_staleness(records: Sequence[ArmRecord]) -> Figure:
    """Results of the settings by reuse, one line for each method, on-policy at the left."""
    shown = [method for method in METHODS if any(record.method == method for record in records)]
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(2, 2).flat, AGAINST_STALENESS.items(), strict=True):
        shifts = 0.08 * (np.arange(len(shown)) - (len(shown) - 1) / 2)
        drawn = [_draw_method(axes, records, name, *one) for one in zip(shown, shifts, strict=True)]
        axes.set_xticks(range(len(REUSE)), [str(SETTINGS[setting].oldest) for setting in REUSE])
        axes.set_xlabel("staleness of the oldest tokens, updates")
        axes.set_ylabel(label)
        if not any(drawn):
            nothing_measured(axes)
    _add_legend(figure, set(shown))
    return figure


def _draw_method(axes: Any, records: Sequence[ArmRecord], name: str, method: str, shift: float) -> bool:
    """Mean over seeds, with bars from the least to the largest; whether there is anything to draw."""
    places, found = [], []
    for place, setting in enumerate(REUSE):
        cell = (stand_in(method, setting), setting)
        values = np.array([one.figures[name] for one in records if (one.method, one.setting) == cell])
        if np.isfinite(values).any():
            places.append(place + shift)
            found.append([bound.item() for bound in spread(list(values[:, None]))])
    if not found:
        return False
    mean, low, high = np.array(found).T
    ends = np.array([mean - low, high - mean]).clip(min=0)  # the mean of equal values may be off by rounding
    bars = {"yerr": ends, "capsize": 2, "linewidth": 1.4, "markersize": 4}
    axes.errorbar(places, mean, marker="o", **_LOOK[method], **bars)
    return True


def _add_legend(figure: Figure, methods: set[str]) -> None:
    known = [method for method in METHODS if method in methods]
    lines = [matplotlib.lines.Line2D([], [], **_LOOK[method], linewidth=2) for method in known]
    labels = [_plain(METHODS[method].label) for method in known]
    figure.legend(lines, labels, loc="outside upper center", ncols=min(len(known), 3), fontsize=9)


def _plain(label: str) -> str:
    """Without the marks of Markdown."""
    return label.replace("`", "")
