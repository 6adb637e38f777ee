"""Draws docs/figures/parallelism.png: how a token travels through TP2 with SP x PP2 x CP2.

python docs/figures/parallelism.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from bapo_megatron.policy.positions import positions

BOUNDS = (0, 8, 12, 16)  # two documents and a padding document
RANKS = ("#4c78a8", "#f2a45c")  # context-parallel ranks
INK, SOFT, PAPER = "#222222", "#777777", "#f5f5f2"
FOLLOWED = 6  # the token that the picture follows
HALVES = "attention and MLP: all tokens,\nheads and columns of TP rank {}"
CHUNK = "a chunk of tokens at a time:\nlogits of vocabulary half {}\nlog-prob, entropy, loss, gradient"


def cell(axes: Axes, x: float, y: float, position: int, rank: int) -> None:
    padding = position >= BOUNDS[2]
    face = "white" if padding else RANKS[rank]
    edge, width = (INK, 2.2) if position == FOLLOWED else ("white", 1.0)
    axes.add_patch(
        Rectangle((x, y), 0.94, 0.8, facecolor=face, edgecolor=SOFT if padding else edge, lw=width)
    )
    document = "AB "[sum(position >= b for b in BOUNDS[1:3])]
    start = max(b for b in BOUNDS if b <= position)
    label = "pad" if padding else f"{document}{position - start}"
    axes.text(
        x + 0.47, y + 0.4, label, ha="center", va="center", fontsize=8, color=SOFT if padding else "white"
    )


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str = PAPER) -> None:
    style = "round,pad=0.02,rounding_size=0.15"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=SOFT, lw=0.8)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], both: bool = False) -> None:
    style = "<|-|>" if both else "-|>"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=10, color=SOFT, lw=1.0))


def heading(axes: Axes, y: float, text: str) -> None:
    axes.text(0, y, text, fontsize=9, color=INK, va="center")


def draw_pack(axes: Axes) -> None:
    heading(
        axes, 15.2, "A pack: documents A and B, cut into 2 x CP chunks; labels, masks and advantages beside"
    )
    owner = {p: rank for rank in (0, 1) for p in positions(BOUNDS, 2, rank).tolist()}
    for position in range(BOUNDS[-1]):
        cell(axes, position, 14.0, position, owner[position])


def draw_context(axes: Axes) -> None:
    for rank in (0, 1):
        x = rank * 8.4
        held = positions(BOUNDS, 2, rank).tolist()
        arrow(axes, (8, 13.9), (x + 3.8, 13.0))
        for column, position in enumerate(held):
            cell(axes, x + column * 0.95, 12.1, position, rank)
        chunks = "first and last chunk" if rank == 0 else "the chunks between"
        label = f"CP rank {rank}: {chunks}"
        axes.text(x + 3.8, 11.8, label, ha="center", va="center", fontsize=8, color=RANKS[rank])


def draw_stage(axes: Axes, y: float, stage: int, rank: int) -> None:
    x = rank * 8.4
    for tensor in (0, 1):
        left = x + tensor * 3.9
        box(axes, left, y + 2.1, 3.6, 0.7, f"norms: half {tensor + 1} of the tokens")
        box(axes, left, y + 0.9, 3.6, 0.8, HALVES.format(tensor), "white")
        arrow(axes, (left + 1.8, y + 2.05), (left + 1.8, y + 1.75), both=True)
    axes.text(
        x + 3.75,
        y + 1.92,
        "SP: all-gather, reduce-scatter",
        ha="center",
        va="center",
        fontsize=6.5,
        color=SOFT,
    )
    if rank == 0:
        arrow(axes, (7.55, y + 1.3), (8.35, y + 1.3), both=True)
        axes.text(7.95, y + 1.55, "keys,\nvalues", ha="center", va="bottom", fontsize=6.5, color=SOFT)
        axes.text(
            -0.4, y + 1.8, f"stage {stage}", rotation=90, ha="center", va="center", fontsize=9, color=INK
        )


def draw_head(axes: Axes) -> None:
    for rank in (0, 1):
        x = rank * 8.4
        arrow(axes, (x + 3.75, 5.35), (x + 3.75, 4.55))
        for tensor in (0, 1):
            box(axes, x + tensor * 3.9, 3.4, 3.6, 1.0, CHUNK.format(tensor + 1), "white")
        arrow(axes, (x + 3.75, 3.3), (x + 3.75, 2.65))
    box(
        axes,
        0,
        1.6,
        15.9,
        0.9,
        "one float64 vector, summed once over packs and ranks: loss, contribution sums, metrics",
    )
    axes.text(-0.4, 3.9, "output head", rotation=90, ha="center", va="center", fontsize=9, color=INK)


def main() -> None:
    figure, axes = plt.subplots(figsize=(11, 10))
    draw_pack(axes)
    draw_context(axes)
    for stage, y in ((0, 8.0), (1, 4.6)):
        for rank in (0, 1):
            arrow(axes, (rank * 8.4 + 3.75, y + 3.55), (rank * 8.4 + 3.75, y + 2.95))
            draw_stage(axes, y, stage, rank)
    axes.text(
        12.4, 8.25, "pipeline: hidden states of the rank's tokens", fontsize=6.5, color=SOFT, va="center"
    )
    draw_head(axes)
    axes.set_xlim(-0.9, 16.2)
    axes.set_ylim(1.4, 15.6)
    axes.axis("off")
    path = Path(__file__).with_name("parallelism.png")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    print(path)


if __name__ == "__main__":
    main()
