"""Figures of the studies: one for each figure of the paper, in its order, and all methods side by side.

Used by ``../command.py`` and ``../controller/command.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from bapo_megatron.commands.report.data import moving_mean, smoothing_window
from bapo_megatron.commands.report.plots import COLOURS, STYLE, TITLE, nothing_measured
from bapo_megatron.commands.report.series import RATIO_CENTRES
from bapo_megatron.runtime.files import write_atomically
from benchmarks.study.contrasts import OUTCOME, by_seed, contrast
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BAPO, BASELINE, COMPARED, METHODS, PASSES, PRIMARY
from benchmarks.study.pages import paper_figures
from benchmarks.study.paired import LEAST_PAIRS, Effect

Arm = tuple[str, int]
"""A method and its passes."""

LABELS = {
    "reward": "reward",
    "entropy": "entropy, nats per token",
    "clipped": "clipped tokens, share",
    "grad_norm": "gradient norm",
    "positive_share": "positive share of the gradient",
    "clip_high": "c_high over positive tokens",
    "clip_low": "c_low over negative tokens",
}
PAPER = "#4d4d4d"
"""Colour of a curve of the paper that has no arm here."""
_PASSES = {(BASELINE, passes): f"{passes}x" for passes in PASSES}
_FIG_7 = {
    ("fixed_0.8_1.5", PRIMARY): "[0.8, 1.5]",
    (BASELINE, PRIMARY): "[0.8, 1.2]",
    ("fixed_0.5_1.2", PRIMARY): "[0.5, 1.2]",
}
_FIG_9 = {(BAPO, PRIMARY): "BAPO", (BASELINE, PRIMARY): "baseline"}
"""Our arms and the names of the paper's curves that they stand beside."""


@dataclass(frozen=True)
class Panel:
    """A set of arms, each minus the same one. Made by both studies' pages."""

    title: str
    baseline: str
    passes: int
    arms: Mapping[str, str]
    """Labels of the arms that are compared, from above; those that have not run have no row."""


def draw_study(records: Sequence[ArmRecord], folder: Path, prefix: str) -> dict[str, str]:
    """Write all pictures as ``folder``/``prefix``_NAME.png; returns the title of each by its file name."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        pictures = {
            "fig2": (
                "Fig. 2: GRPO at 1, 2, 4 and 8 passes",
                _beside(records, "fig2", _PASSES, ("reward", "entropy", "clipped", "grad_norm")),
            ),
            "fig4": ("Fig. 4: positive (solid) and negative (dashed) share of the gradient", _fig_4(records)),
            "fig7": ("Fig. 7: fixed bounds", _beside(records, "fig7", _FIG_7, ("reward", "entropy"))),
            "fig8": ("Fig. 8: BAPO's bounds", _fig_8(records)),
            "fig9": (
                "Fig. 9: BAPO and GRPO",
                _beside(records, "fig9", _FIG_9, ("reward", "entropy", "positive_share", "grad_norm")),
            ),
            "fig10": ("Fig. 10: probability of tokens by ratio", _fig_10(records)),
            "methods": (
                "All methods: mean reward of the run minus GRPO's",
                differences(records, _compared()),
            ),
        }
        return {
            _save(figure, folder, f"{prefix}_{name}"): title for name, (title, figure) in pictures.items()
        }


def draw_differences(records: Sequence[ArmRecord], panels: Sequence[Panel], file: Path) -> None:
    """Write the picture of all ``differences``; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        _save(differences(records, panels), file.parent, file.stem)


def differences(records: Sequence[ArmRecord], panels: Sequence[Panel]) -> Figure:
    """Differences in mean reward with 95 % intervals, not corrected for their number: a panel a set.

    An arm that shares fewer than ``LEAST_PAIRS`` seeds with its baseline has no row.
    """
    figure, [grid] = _panels(len(panels), 1)
    found = [_effects(records, panel) for panel in panels]
    rows = max(3, *map(len, found))
    figure.set_size_inches(10, 1.4 + 0.3 * rows)
    for axes, panel, effects in zip(grid, panels, found, strict=True):
        for place, one in enumerate(reversed(effects.values())):
            bar = [[one.mean - one.low], [one.high - one.mean]]
            axes.errorbar([one.mean], [place], xerr=bar, marker="o", capsize=2, color=COLOURS[0])
        axes.axvline(0, color=PAPER, linewidth=1)
        axes.set_yticks(range(len(effects)), reversed(effects))
        axes.set_ylim(len(effects) - rows - 0.5, len(effects) - 0.5)  # rows are equally high in all panels
        axes.set_title(panel.title, **TITLE)
        if not effects:
            nothing_measured(axes)
        else:
            own = by_seed(records, panel.baseline, panel.passes, OUTCOME)
            axes.set_xlabel(f"mean reward minus GRPO's {np.mean(list(own.values())):.3f}")
    return figure


def _effects(records: Sequence[ArmRecord], panel: Panel) -> dict[str, Effect]:
    """The differences of a panel by the labels of their arms."""
    found = {
        label: contrast(records, arm, panel.baseline, panel.passes).effect
        for arm, label in panel.arms.items()
    }
    return {label: one for label, one in found.items() if one is not None and one.pairs >= LEAST_PAIRS}


def _compared() -> list[Panel]:
    """All methods but GRPO at 4 and at 8 passes."""
    arms = {name: one.label for name, one in METHODS.items() if name != BASELINE}
    return [Panel(f"{passes} passes", BASELINE, passes, arms) for passes in COMPARED]


def spread(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, smallest and largest value at each point, of those that exist; NaN where none does."""
    stacked = np.stack(curves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point without values is NaN, as it should be
        return np.nanmean(stacked, 0), np.nanmin(stacked, 0), np.nanmax(stacked, 0)


def _save(figure: Figure, folder: Path, name: str) -> str:
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})  # it names a version
    file = f"{name}.png"
    write_atomically(folder / file, picture.getvalue())
    return file


def _panels(columns: int, rows: int = 2) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(0.6 + 3.2 * columns, 0.7 + 2.6 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _beside(
    records: Sequence[ArmRecord], figure_name: str, arms: Mapping[Arm, str], names: Sequence[str]
) -> Figure:
    """A column for each curve: our arms above, the paper's curves below."""
    figure, grid = _panels(len(names))
    for (ours, theirs), name in zip(grid.T, names, strict=True):
        _draw(ours, records, list(arms), name)
        _draw_paper(theirs, paper_figures.curves(f"{figure_name}_{name}"), list(arms.values()))
        if name == "grad_norm":
            theirs.set_yscale("log")
            theirs.set_ylim(0.05, 150)  # what the paper's linear axis resolves
    _name_rows(grid)
    _add_legend(figure, [f"{METHODS[method].label}, {name_of(passes)}" for method, passes in arms])
    return figure


def _draw(axes: Any, records: Sequence[ArmRecord], arms: Sequence[Arm], name: str) -> None:
    """Lines are means over seeds of smoothed curves; shades reach from the smallest to the largest seed."""
    drawn = False
    for place, (method, passes) in enumerate(arms):
        runs = [one.curves[name] for one in records if (one.method, one.passes) == (method, passes)]
        if runs and np.isfinite(np.concatenate(runs)).any():
            _draw_runs(axes, runs, COLOURS[place % len(COLOURS)])
            drawn = True
    axes.set_title(LABELS[name], **TITLE)
    if not drawn:
        nothing_measured(axes)
    elif name == "grad_norm":
        axes.set_yscale("log")


def _draw_runs(axes: Any, runs: Sequence[np.ndarray], colour: str, line: str = "-") -> None:
    length = max(map(len, runs))
    padded = [np.pad(run.astype(float), (0, length - len(run)), constant_values=np.nan) for run in runs]
    mean, low, high = spread([moving_mean(run, smoothing_window(length)) for run in padded])
    steps = np.arange(1, length + 1)
    axes.plot(steps, mean, line, color=colour, linewidth=1.8, marker="o" if length < 3 else None)
    axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)


def _draw_paper(axes: Any, found: Mapping[str, paper_figures.Curve], names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if name in found:
            colour = COLOURS[place % len(COLOURS)]
            axes.plot(found[name].step, found[name].value, color=colour, linewidth=1.2)
    axes.set_xlabel("step")


def _name_rows(grid: np.ndarray) -> None:
    for row, name in zip(grid, ("here", "the paper"), strict=True):
        row[0].set_ylabel(name, fontsize=11)


def _fig_4(records: Sequence[ArmRecord]) -> Figure:
    figure, grid = _panels(2, 1)
    ours, theirs = grid[0]
    for place, passes in enumerate(PASSES):
        runs = [
            one.curves["positive_share"]
            for one in records
            if (one.method, one.passes) == (BASELINE, passes)
            and np.isfinite(one.curves["positive_share"]).any()
        ]
        if runs:
            _draw_runs(ours, runs, COLOURS[place])
            _draw_runs(ours, [1 - run for run in runs], COLOURS[place], "--")
    if not ours.lines:
        nothing_measured(ours)
    found = paper_figures.curves("fig4_positive_share")
    theirs.plot(found["positive"].step, found["positive"].value, color=PAPER)
    theirs.plot(found["negative"].step, found["negative"].value, "--", color=PAPER)
    ours.set_title("here, after the first pass", **TITLE)
    theirs.set_title("the paper", **TITLE)
    _add_legend(figure, [f"GRPO, {name_of(passes)}" for passes in PASSES])
    return figure


def _fig_8(records: Sequence[ArmRecord]) -> Figure:
    figure, grid = _panels(2)
    for (ours, theirs), (name, bound) in zip(
        grid.T, (("clip_high", "c_high"), ("clip_low", "c_low")), strict=True
    ):
        _draw(ours, records, [(BAPO, PRIMARY)], name)
        curve = paper_figures.fig_8(bound)
        theirs.plot(curve.step, curve.value, color=PAPER, linewidth=1.2)
        theirs.set_xlabel("step")
        ours.sharey(theirs)
    _name_rows(grid)
    return figure


def _fig_10(records: Sequence[ArmRecord]) -> Figure:
    figure, grid = _panels(2, 1)
    ours, theirs = grid[0]
    runs = [one.curves["profile"] for one in records if (one.method, one.passes) == (BASELINE, PRIMARY)]
    if runs and np.isfinite(np.concatenate(runs)).any():
        mean, low, high = spread(runs)
        ours.plot(RATIO_CENTRES, mean, color=COLOURS[0], marker="o", markersize=4)
        ours.fill_between(RATIO_CENTRES, low, high, color=COLOURS[0], alpha=0.12, linewidth=0)
    else:
        nothing_measured(ours)
    ours.set_title("here, GRPO at 8x", **TITLE)
    theirs.plot(*paper_figures.fig_10(), color=PAPER, marker="o", markersize=4)
    theirs.set_title("the paper", **TITLE)
    for axes in grid[0]:
        axes.set_xlabel("ratio")
        axes.set_xlim(0.4, 2.2)
        axes.set_ylim(0, 1)
    ours.set_ylabel("mean probability")
    return figure


def _add_legend(figure: Figure, labels: Sequence[str]) -> None:
    lines = [
        matplotlib.lines.Line2D([], [], color=COLOURS[place % len(COLOURS)], linewidth=2)
        for place in range(len(labels))
    ]
    figure.legend(lines, labels, loc="outside upper center", ncols=min(len(labels), 4), fontsize=9)


def name_of(passes: int) -> str:
    """Name of a staleness: on-policy, 2x, 4x, 8x."""
    return "on-policy" if passes == 1 else f"{passes}x"
