"""Figure of the positive share over c_low under both measures (docs/algorithm.md).

    python -m studies.c_low_finding

Uses a synthetic stale batch in which c_high alone cannot reach the target. Writes
docs/figures/c_low_finding.png and prints the result of both searches.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, get_args

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from bapo_megatron.algo.bapo import contribution_sums
from bapo_megatron.algo.bounds import (
    Bounds,
    BoundsConfig,
    Measure,
    high_values,
    low_values,
    positive_share,
    search_bounds,
)
from benchmarks.common import no_options

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "c_low_finding.png"
TOKENS = 200_000
COLORS = {"surrogate": "#c2410c", "gradient": "#1d4ed8"}
NAMES = {"surrogate": "surrogate (Eq. 8)", "gradient": "gradient (Eq. 5)"}


class Curves(NamedTuple):
    by_low: list[float]
    """Share at every c_low, with c_high at its maximum."""
    by_move: list[float]
    """Share after every move of the search, without early stopping."""
    found: Bounds


def synthetic_batch() -> dict[str, torch.Tensor]:
    """Batch whose tokens are one third positive, with mean log-ratios of +0.1 (positive) and -0.1."""
    generator = torch.Generator().manual_seed(0)
    positive_T = torch.rand(TOKENS, generator=generator) < 0.33
    noise_T = 0.25 * torch.randn(TOKENS, generator=generator)
    return {
        "log_ratio_T": noise_T + torch.where(positive_T, 0.10, -0.10),
        "advantage_T": torch.where(positive_T, 1.0, -1.0),
        "rollout_log_prob_T": torch.zeros(TOKENS),
        "mask_T": torch.ones(TOKENS),
    }


def curves(measure: Measure) -> Curves:
    config = BoundsConfig(measure=measure, share="absolute", weight="uniform", order="high_first")
    sums = contribution_sums(**synthetic_batch(), config=config).tolist()
    highs = len(high_values(config))
    positive, negative = sums[:highs], sums[highs:]
    by_high = [positive_share(value, negative[0], "absolute") for value in positive]
    by_low = [positive_share(positive[-1], value, "absolute") for value in negative]
    return Curves(by_low, by_high + by_low[1:], search_bounds(sums, config))


def draw_by_low(axes: Axes, measures: dict[str, Curves], config: BoundsConfig) -> None:
    lows = low_values(config)
    for name, curve in measures.items():
        axes.plot(lows, curve.by_low, "o-", color=COLORS[name], markersize=3.5)
        rises = curve.by_low[-1] > curve.by_low[0]
        axes.annotate(
            NAMES[name], (lows[9], curve.by_low[9]), (-8, 6) if rises else (-8, -20),
            textcoords="offset points", color=COLORS[name], ha="right",
        )  # fmt: skip
    axes.set_xlabel("$c_{low}$  (with $c_{high}$ at its end, 3.0)")
    axes.set_ylabel("share of the positive tokens, P / (P + N)")
    axes.set_title("Raising $c_{low}$", loc="left")


def draw_path(axes: Axes, measures: dict[str, Curves], config: BoundsConfig) -> None:
    turn = len(high_values(config)) - 1
    axes.axvspan(turn, turn + len(low_values(config)) - 1, color="0.94", zorder=0)
    for name, curve in measures.items():
        moves, stop = range(len(curve.by_move)), curve.found.rounds
        axes.plot(moves, curve.by_move, ":", color=COLORS[name], linewidth=1)
        axes.plot(moves[: stop + 1], curve.by_move[: stop + 1], color=COLORS[name])
        axes.plot(stop, curve.by_move[stop], "s" if curve.found.reached else "X", color=COLORS[name])
        ending = "reached" if curve.found.reached else "not reached, ends"
        axes.annotate(
            f"{ending} at $c_{{low}}$ = {curve.found.low:g}", (stop, curve.by_move[stop]),
            (-6, 8) if curve.found.reached else (0, -18),
            textcoords="offset points", color=COLORS[name], ha="right",
        )  # fmt: skip
    axes.text(turn / 2, 0.02, "$c_{high}$ moves", ha="center", transform=axes.get_xaxis_transform())
    axes.text(turn + 7.5, 0.02, "$c_{low}$ moves", ha="center", transform=axes.get_xaxis_transform())
    axes.set_xlabel("moves of the search")
    axes.set_title("The search", loc="left")


def draw(measures: dict[str, Curves], config: BoundsConfig) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    draw_by_low(left, measures, config)
    draw_path(right, measures, config)
    for axes in (left, right):
        axes.axhline(config.target, color="0.35", linewidth=1, linestyle="--")
        axes.spines[["top", "right"]].set_visible(False)
    left.text(0.6, config.target, f"target {config.target:g}", va="bottom", color="0.35")
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    no_options(__doc__)
    measures = {measure: curves(measure) for measure in get_args(Measure)}
    for name, curve in measures.items():
        print(f"{name}: share {curve.by_low[0]:.3f} -> {curve.by_low[-1]:.3f} over c_low; {curve.found}")
    draw(measures, BoundsConfig())
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
