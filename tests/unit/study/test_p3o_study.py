"""The study of P3O: arms that are the second study's, its verdicts, on lines made up by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.p3o_study.arms import CONTROLS, LOW, NEW, SEEDS, arms, differences, published
from benchmarks.p3o_study.page import page

GONE = (
    "--algorithm.bounds.negative-weight",
    "--algorithm.bounds.low-within-batch",
    "--algorithm.loss-settings",
)
"""Flags of the second study of settings that are gone, or have their default."""


def lines(reward: float = 0.0, ess: float = 0.9) -> list[dict[str, Any]]:
    """A line of each arm. P3O's mean reward is ``reward`` above that of GRPO with its mean, seed by seed."""
    known = {line["arm"]: line for line in published()}
    found = []
    for arm in arms(Path("study")):
        figures = dict(known[arm.name.replace("p3o", "grpo")]["figures"])
        if arm.method.startswith("p3o"):
            figures |= {"mean_reward": figures["mean_reward"] + reward + 0.001 * (arm.seed % 2), "ess": ess}
        found.append(
            {"arm": arm.name, "method": arm.method, "passes": 8, "seed": arm.seed, "figures": figures}
        )
    return found


def test_the_controls_have_the_flags_of_the_runs_that_they_repeat() -> None:
    every, known = arms(Path("study")), {line["arm"]: line["command"] for line in published()}
    for arm in every[: len(CONTROLS)]:
        theirs = {flag for flag in known[arm.name][2:] if not flag.startswith(GONE)}
        assert {*arm.flags} - {"--algorithm.loss=clip"} == theirs - {"--algorithm.loss=clip"}
    judged = every[len(CONTROLS) :][: len(NEW) * len(SEEDS)]
    assert {arm.method for arm in judged} == {*NEW}
    assert "--optimizer.lr=5.95e-05" in every[-1].flags
    assert every[-1].method == NEW[-1] + LOW


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
    found = page(lines(reward), 50)
    assert said in found
    assert "Not judged" not in found
    assert found.count("every figure is the published one") == len(CONTROLS)


def test_what_is_not_judged() -> None:
    """A missing seed, a gate that fails, a control that differs or has not run."""
    assert "11 of 12 seeds have run" in page([one for one in lines() if one["arm"] != "p3o-8-seed11"], 50)
    assert "stale updates: fails, 0.995 ± 0, must be at most 0.99" in page(lines(ess=0.995), 50)
    changed = lines()
    changed[0]["figures"]["held_out"] += 0.01
    [told] = differences(changed[0], published()).items()
    assert told[0] == "held_out"
    for part in (changed, lines()[1:]):
        assert "the second study's runs are not shown to repeat" in page(part, 50)
