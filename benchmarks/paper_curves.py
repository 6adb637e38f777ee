"""Extractor of the paper's curves (Figs. 2, 4, 7, 9, 10) from the vector graphics of its PDF.

    git clone https://github.com/WooooDyy/BAPO && git -C BAPO show 58f8008:paper.pdf > paper.pdf
    python -m benchmarks.paper_curves paper.pdf benchmarks/data      # needs PyMuPDF

writes bapo_curves.csv, a row for each step and a column for each curve (interpolated between the drawn
points, empty where a curve has none), and bapo_fig10.csv, the points of Fig. 10 in bins of the ratio. A
drawing's number is its place on the page; pixels and values of two ticks calibrate each axis. Fig. 8 is in
bapo_fig8.csv.
"""

from __future__ import annotations

import csv
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STEPS = np.arange(1, 151)
EDGES = (0.0, 0.6, 0.7, 0.8, 0.9, 0.98, 1.02, 1.1, 1.2, 1.5, 2.0)
Axis = tuple[tuple[float, float], tuple[float, float]]
"""(pixel, value) of two ticks."""


class Panel(NamedTuple):
    """A panel of curves: page, axes, and the drawings by name."""

    page: int
    x: Axis
    y: Axis
    curves: dict[str, int]


def _x(zero: float, last: float, steps: float = 150) -> Axis:
    return (zero, 0.0), (last, steps)


PANELS = {
    "fig2_reward": Panel(
        1, _x(77.84, 115.48, 100), ((397.82, 0.3), (346.05, 0.5)), {"1x": 15, "2x": 16, "4x": 17, "8x": 18}
    ),
    "fig2_entropy": Panel(
        1, _x(195.28, 232.92, 100), ((368.84, 0.2), (338.50, 0.4)), {"1x": 34, "2x": 35, "4x": 36, "8x": 37}
    ),
    "fig2_clipped": Panel(
        1, _x(312.72, 350.36, 100), ((395.13, 0.0), (341.37, 0.04)), {"2x": 56, "4x": 57, "8x": 58}
    ),
    "fig2_grad_norm": Panel(
        1,
        _x(430.16, 467.8, 100),
        ((394.49, 0.0), (327.93, 100.0)),
        {"1x": 79, "2x": 76, "4x": 77, "8x": 78},
    ),
    "fig4_positive_share": Panel(
        3, _x(80.99, 177.72), ((568.07, 0.35), (548.88, 0.45)), {"negative": 20, "positive": 21}
    ),
    "fig7_reward": Panel(
        5,
        _x(310.79, 408.65),
        ((319.39, 0.4), (286.32, 0.5)),
        {"[0.8, 1.5]": 17, "[0.8, 1.2]": 18, "[0.5, 1.2]": 19},
    ),
    "fig7_entropy": Panel(
        5,
        _x(428.23, 526.09),
        ((331.63, 0.0), (289.43, 0.4)),
        {"[0.8, 1.5]": 41, "[0.8, 1.2]": 42, "[0.5, 1.2]": 43},
    ),
    "fig9_reward": Panel(7, _x(94.5, 180.95), ((156.9, 0.3), (95.18, 0.6)), {"BAPO": 19, "baseline": 20}),
    "fig9_entropy": Panel(
        7, _x(201.72, 288.17), ((135.03, 0.1), (107.98, 0.2)), {"BAPO": 42, "baseline": 41}
    ),
    "fig9_positive_share": Panel(
        7, _x(308.94, 395.39), ((148.9, 0.40), (100.92, 0.46)), {"BAPO": 65, "baseline": 64}
    ),
    "fig9_grad_norm": Panel(7, _x(416.16, 502.61), ((153.85, 0.0), (92.92, 100.0)), {"baseline": 85}),
}
"""Panels that are drawn beside ours. Colours and legends say which curve is which."""


def _value(pixel: np.ndarray, axis: Axis) -> np.ndarray:
    (a, at_a), (b, at_b) = axis
    return at_a + (pixel - a) * (at_b - at_a) / (b - a)


def _points(drawing: dict[str, Any]) -> np.ndarray:
    lines = [item for item in drawing["items"] if item[0] == "l"]
    return np.array([tuple(lines[0][1]), *(tuple(line[2]) for line in lines)])


def curves(document: Any) -> dict[str, np.ndarray]:
    """Each curve at ``STEPS``, NaN before its first point and after its last."""
    drawings = {page: document[page].get_drawings() for page in {panel.page for panel in PANELS.values()}}
    found = {}
    for name, panel in PANELS.items():
        for curve, number in panel.curves.items():
            points = _points(drawings[panel.page][number])
            steps, values = _value(points[:, 0], panel.x), _value(points[:, 1], panel.y)
            found[f"{name} {curve}"] = np.interp(STEPS, steps, values, left=np.nan, right=np.nan)
    return found


def fig_10(document: Any) -> list[tuple[float, float, int, float]]:
    """Fig. 10's middle panel: edges of each bin of the ratio, points in it, mean probability."""
    boxes = [one["rect"] for one in document[7].get_drawings() if one["type"] in ("f", "fs")]
    centres = np.array([((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2) for box in boxes if box.width < 2])
    x, y = centres.T
    inside = (x > 241) & (x < 372) & (y > 212) & (y < 305)
    ratio = _value(x[inside], ((251.86, 0.5), (345.19, 1.5)))
    probability = _value(y[inside], ((301.33, 0.0), (220.44, 1.0)))
    rows = []
    for low, high in pairwise(EDGES):
        chosen = (ratio >= low) & (ratio < high)
        if chosen.any():
            rows.append((low, high, int(chosen.sum()), float(probability[chosen].mean())))
    return rows


def main(pdf: str, folder: str) -> None:
    """Write both tables."""
    import pymupdf  # type: ignore[import-not-found]

    document = pymupdf.open(pdf)
    found = curves(document)
    with (Path(folder) / "bapo_curves.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *found])
        for place, step in enumerate(STEPS):
            values = (series[place] for series in found.values())
            writer.writerow([step, *("" if np.isnan(value) else f"{value:.4g}" for value in values)])
    with (Path(folder) / "bapo_fig10.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["from", "to", "points", "probability"])
        writer.writerows((low, high, count, f"{mean:.4g}") for low, high, count, mean in fig_10(document))


if __name__ == "__main__":
    main(*sys.argv[1:3])
