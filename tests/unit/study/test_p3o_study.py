"""The study of P3O: its page is that of its results, its arms have the second study's flags."""

from __future__ import annotations

import json
from pathlib import Path

from studies.p3o_study.arms import METHODS, P3O, REAL, REAL_SEEDS, ROOT, SEEDS, arms, published
from studies.p3o_study.page import page

GONE = (
    "--algorithm.bounds.negative-weight",
    "--algorithm.bounds.low-within-batch",
    "--algorithm.loss-settings",
)
"""Flags of the second study for settings that are gone, or have their default."""


def test_the_page_is_that_of_the_published_lines() -> None:
    _, *lines = map(json.loads, (ROOT / "studies/results/p3o_study.jsonl").read_text().splitlines())
    found = page(lines, len(arms(Path("study"))))
    assert found == (ROOT / "studies/results/p3o_study.md").read_text()
    missing = [one for one in lines if one["arm"] != "grpo-8-seed0"]  # whose published run does not stand in
    assert "- **Not judged**: 11 of 12 seeds have run" in page(missing, 100)


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
