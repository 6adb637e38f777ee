"""Figure of the registered losses: gradient factor over the importance ratio (docs/losses.md).

    python -m studies.loss_figure

Writes docs/figures/losses.png: one panel per loss, computed by the loss itself at its defaults. A loss over
whole responses sees responses of one token each.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from bapo_megatron.algo.bapo import BoundsConfig, fixed
from bapo_megatron.algo.losses import LOSSES, Loss, build_loss
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from benchmarks.common import no_options

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "losses.png"
COLORS = {1.0: "#8fb4f5", -1.0: "#c2410c"}
WIDTHS = {1.0: 3.6, -1.0: 1.5}
"""Line widths by the sign of the advantage: coinciding lines both stay visible."""
LINES: dict[float, Any] = {0.4: "-", 0.02: (0, (1, 1.4))}
"""Line styles by the probability under the old policy."""
SOFT = "#8a8a8a"
RATIOS = (1 / 8, 1 / 2, 1, 2, 8)
CLIP = fixed(0.8, 1.28)
COLUMNS, LARGEST, POINTS = 4, 8, 2401


def loss_of(name: str) -> Loss:
    """The loss at its defaults, with fixed bounds if it searches bounds."""
    searches = build_loss(AlgorithmConfig(loss=name)).bounds == "searched"
    return build_loss(AlgorithmConfig(loss=name, bounds=CLIP if searches else BoundsConfig()))


def factors(loss: Loss, ratio_T: Tensor, probability: float) -> dict[float, Tensor]:
    """Gradient factor g at these ratios, by the sign of the advantage; NaN where pi would exceed 1."""
    count = 2 * len(ratio_T)
    old_T = torch.full((count,), probability, dtype=torch.float64).log()
    batch = MicroBatch.of(
        (0, count),
        sequences=count,
        mask_T=torch.ones(count),
        weight_T=torch.ones(count),
        advantage_T=torch.tensor([1.0, -1.0]).repeat_interleave(len(ratio_T)),
        rollout_log_prob_T=old_T,
        old_log_prob_T=old_T,
        sequence_T=torch.arange(count),
    )
    stats = TokenStats(old_T + ratio_T.log().repeat(2), torch.zeros(count))
    bounds = loss.search.find(loss.search.measure(stats, batch)) if loss.search else None
    possible_T = ratio_T * probability < 1
    halves = loss.terms(stats, batch, bounds).gradient_T.chunk(2)
    return {
        sign: torch.where(possible_T, half_T, math.nan) for sign, half_T in zip(COLORS, halves, strict=True)
    }


def draw(axes: Axes, name: str) -> None:
    """Draw the panel of one loss."""
    reach = math.log(LARGEST)
    loss, ratio_T = loss_of(name), torch.linspace(-reach, reach, POINTS, dtype=torch.float64).exp()
    common, rare = (factors(loss, ratio_T, probability) for probability in LINES)
    axes.plot(ratio_T, ratio_T, color="#bdbdbd", lw=1, zorder=0)
    axes.axvline(1, color="#e4e4e4", lw=1, zorder=0)
    for sign, color in COLORS.items():
        differ = bool(((common[sign] - rare[sign]).abs() > 1e-6).any())
        lines = {0.4: common[sign], 0.02: rare[sign]} if differ else {0.4: rare[sign]}
        for probability, factor_T in lines.items():
            style = LINES[probability]
            axes.plot(ratio_T, factor_T, color=color, lw=WIDTHS[sign], ls=style, clip_on=False)
    axes.set_title(name, fontsize=10, loc="left", family="monospace")
    axes.set_xscale("log", base=2)
    axes.set_yscale("function", functions=(np.sqrt, np.square))
    axes.set(xlim=(1 / LARGEST, LARGEST), ylim=(0, LARGEST), yticks=[0, 1, 2, 5])
    axes.set_xticks(RATIOS, [str(Fraction(ratio)) for ratio in RATIOS])
    axes.tick_params(length=0, labelsize=8, colors=SOFT)
    for side in axes.spines.values():
        side.set_visible(False)


def main() -> None:
    no_options(__doc__)
    names = ["bapo" if "bapo" in LOSSES else "clip", *sorted(set(LOSSES) - {"bapo", "clip"})]
    rows = -(-len(names) // COLUMNS)
    figure, panels = plt.subplots(rows, COLUMNS, figsize=(9.6, 2.35 * rows + 0.7), sharex=True, sharey=True)
    for axes, name in zip(panels.flat, names, strict=False):
        draw(axes, name)
    for axes, above in zip(panels.flat[len(names) :], panels.flat[len(names) - COLUMNS :], strict=False):
        axes.set_visible(False)
        above.tick_params(labelbottom=True)
    figure.supxlabel("ratio r = pi / pi_old", fontsize=9)
    figure.supylabel("gradient factor g", fontsize=9)
    handles = [
        plt.Line2D([], [], color=COLORS[1.0], lw=WIDTHS[1.0], label="A = 1"),
        plt.Line2D([], [], color=COLORS[-1.0], lw=WIDTHS[-1.0], label="A = -1"),
        plt.Line2D([], [], color=SOFT, lw=1.8, ls=LINES[0.02], label="old probability 0.02 instead of 0.4"),
        plt.Line2D([], [], color="#bdbdbd", lw=1, label="g = r: no clipping"),
    ]
    figure.legend(handles=handles, loc="upper center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.32 / figure.get_size_inches()[1]))
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
