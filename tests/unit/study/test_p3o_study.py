"""The study of P3O: arms with the second study's flags, verdicts, on lines made up by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from studies.p3o_study.arms import METHODS, P3O, REAL, REAL_SEEDS, SEEDS, arms, published
from studies.p3o_study.page import page

GONE = (
    "--algorithm.bounds.negative-weight",
    "--algorithm.bounds.low-within-batch",
    "--algorithm.loss-settings",
)
"""Flags of the second study for settings that are gone, or have their default."""


def lines(reward: float = 0.0, ess: float = 0.9) -> list[dict[str, Any]]:
    """A line of each arm: the studies' own, and for P3O those of GRPO with its mean, ``reward`` higher."""
    known = {(line["method"], line["passes"], line["seed"]): line for line in published()}
    found = []
    for arm in arms(Path("study")):
        figures = dict(known[arm.method.replace("p3o", "grpo"), 8, arm.seed]["figures"])
        if arm.method.startswith("p3o"):
            figures |= {"mean_reward": figures["mean_reward"] + reward + 0.001 * (arm.seed % 2), "ess": ess}
        found.append(
            {"arm": arm.name, "method": arm.method, "passes": 8, "seed": arm.seed, "figures": figures}
        )
    return found


def test_arms_have_the_flags_of_the_studies_runs() -> None:
    every = arms(Path("study"))
    known = {(line["method"], line["passes"], line["seed"]): line["command"] for line in published()}
    assert len(every) == len(SEEDS) * (len(METHODS) + len(P3O)) + len(REAL_SEEDS)
    for arm in every:
        command = known[arm.method.replace("p3o", "grpo"), 8, arm.seed]
        theirs = {flag for flag in command[2:] if not flag.startswith(GONE)}
        ours = {flag.replace("=p3o", "=clip") for flag in arm.flags}
        bounds = {flag for flag in ours | theirs if flag.startswith("--algorithm.bounds.")}
        assert ours - bounds == theirs - bounds
        assert arm.method.startswith("p3o") or ours == theirs
    assert (every[-1].method, every[-1].seed) == (P3O[0] + REAL, REAL_SEEDS[-1])


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (0.2, "- `p3o` against `grpo`: better\n"),
        (0.01, "- `p3o` against `grpo`: better, by less than the 0.05 that matters\n"),
        (-0.2, "- `p3o` against `grpo`: worse\n"),
        (0.0, "- `paper` against `p3o`: no difference shown; an advantage of 0.05 or more is ruled out\n"),
    ],
)
def test_verdicts_of_a_whole_study(reward: float, said: str) -> None:
    found = page(lines(reward), 96)
    assert said in found
    assert "Not judged" not in found
    assert f"| `p3o{REAL}` - `grpo{REAL}` | {reward:+.3f}" in page(
        lines(reward - 0.0005), 104
    )  # a half of seeds
    assert "| `grpo` | +0.000 (+0.000 to +0.000), 12 seeds |" in found  # now minus then


def test_what_is_not_judged() -> None:
    """A missing seed, of P3O or of GRPO, whose published run does not stand in, and a gate that fails."""
    for missing in ("p3o-8-seed11", "grpo-8-seed0"):
        found = page([one for one in lines() if one["arm"] != missing], 96)
        assert "- **Not judged**: 11 of 12 seeds have run" in found
    assert "stale updates: fails, 0.995 ± 0, must be at most 0.99" in page(lines(ess=0.995), 96)
