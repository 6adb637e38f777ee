"""Distribution plots of a report: probability and entropy by importance ratio, and the entropy's change.

The first two are the paper's Figs. 5 and 10, the last is Eq. 6: the predicted change against the measured
one. ``draw_distribution`` draws into axes that the caller makes. Used in this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.ticker import NullLocator

from bapo_megatron.commands.report.data import RunRecord
from bapo_megatron.commands.report.panels import Panel
from bapo_megatron.commands.report.series import (
    FEW_TOKENS,
    RATIO_CENTRES,
    prediction,
    ratio_profile,
    ratio_tokens,
)

_TICKS = {RATIO_CENTRES[0]: "<0.5", 0.7: "0.7", 1.0: "1", 1.4: "1.4", 2.0: "2", RATIO_CENTRES[-1]: "≥3"}
"""The outer bins have no end."""
_FEW = f" Hollow and pale: fewer than {FEW_TOKENS} tokens, so mostly chance."
_MANY = 200
"""Number of points above which they are drawn small."""
_MOST = 2000
"""Number of points above which every second, third, ... is drawn."""

DISTRIBUTIONS = (
    Panel(
        "ratio_probability",
        "Probability against ratio",
        "mean probability of the token",
        (),
        "Mean probability of the tokens at each importance ratio, over the whole run. In the paper it falls "
        "on both sides of 1: what the bounds clip are unlikely tokens." + _FEW,
        "Figs. 5 and 10",
    ),
    Panel(
        "ratio_entropy",
        "Entropy against ratio",
        "mean entropy (nats)",
        (),
        "Mean entropy where the tokens of each ratio were chosen. In the paper it rises on both sides of 1: "
        "where the policy is undecided, ratios move most." + _FEW,
        "Fig. 10",
    ),
    Panel(
        "entropy_prediction",
        "Entropy-Clip Rule",
        "measured change (nats)",
        (),
        "The change of the entropy that Eq. 6 predicts, and the one that came: from each pass over a batch "
        "to the next, or from each update to the next, which has other tokens, if batches are used once. The "
        "scale of the prediction means nothing.",
        "Eq. 6",
    ),
)

Drawn = tuple[RunRecord, str]
"""A run to draw, and its colour."""


def draw_distribution(axes: Any, panel: Panel, runs: Sequence[Drawn]) -> list[list[Any]]:
    """Draw ``panel`` for all runs; returns each run's artists, none for a run that did not measure it."""
    if panel.file == "entropy_prediction":
        artists = [_scatter(axes, run, colour) for run, colour in runs]
        axes.set_xlabel("predicted change, any unit")
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        return artists
    what: Literal["probability", "entropy"] = (
        "probability" if panel.file == "ratio_probability" else "entropy"
    )
    artists = [_profile(axes, run, colour, what) for run, colour in runs]
    axes.set_xscale("log")
    axes.set_xticks(list(_TICKS), list(_TICKS.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.4, 4.0)
    axes.set_xlabel("importance ratio")
    if any(artists):
        axes.set_ylim(bottom=0)
    return artists


def _profile(axes: Any, run: RunRecord, colour: str, what: Literal["probability", "entropy"]) -> list[Any]:
    profile, tokens = ratio_profile(run, what), ratio_tokens(run)
    known = np.isfinite(profile.value)
    if not known.any():
        return []
    enough = known if tokens is None else known & (tokens >= FEW_TOKENS)
    pale = known & ~enough
    line = axes.plot(profile.step[known], profile.value[known], "-", color=colour, linewidth=1, alpha=0.35)
    firm = axes.plot(
        profile.step, np.where(enough, profile.value, np.nan), "o-", color=colour, linewidth=2, ms=4
    )
    hollow = axes.plot(
        profile.step[pale], profile.value[pale], "o", color=colour, markerfacecolor="none", alpha=0.45, ms=5
    )
    return [*line, *firm, *hollow]


def _scatter(axes: Any, run: RunRecord, colour: str) -> list[Any]:
    found = prediction(run)
    if not len(found.predicted):
        return []
    count, every = len(found.predicted), 1 + len(found.predicted) // _MOST
    label = "" if found.correlation is None else f"correlation {found.correlation:.2f} of {count} points"
    if label and every > 1:
        label += f", of {every} one drawn"
    size = 9 if count > _MANY else 26
    drawn = (values[::every] for values in (found.predicted, found.measured))
    points = axes.scatter(*drawn, s=size, color=colour, alpha=0.45, linewidths=0)
    points.set_label(label)
    return [points]
