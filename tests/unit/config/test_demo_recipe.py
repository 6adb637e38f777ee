"""The demo shows the method at its default, on a task where that has work, and says what it does not show."""

from __future__ import annotations

import json
from pathlib import Path

from bapo_megatron.algo.bounds import paper
from bapo_megatron.checkpoint.run_directory import plain_values, with_present_fields
from bapo_megatron.config import AlgorithmConfig, RunConfig, load_recipe

ROOT = Path(__file__).parents[3]
DEMO = load_recipe(ROOT / "recipes/demo_cpu.py", RunConfig)


def test_the_demo_has_the_default_preset() -> None:
    assert DEMO.algorithm.bounds == paper() == AlgorithmConfig().bounds
    assert DEMO.algorithm.loss == "clip"
    assert DEMO.steps <= 40


def test_the_demo_says_what_it_does_not_show() -> None:
    for text in (
        DEMO.logging.note,
        (ROOT / "README.md").read_text(),
        (ROOT / "recipes/demo_cpu.py").read_text(),
    ):
        assert "does not show" in text
        assert "made" in text  # of the task


def test_the_study_is_not_of_the_demo() -> None:
    """What changes in the demo changes no arm of the study, whose results are stored."""
    with (ROOT / "docs/study.jsonl").open() as lines:
        stored = with_present_fields(json.loads(next(lines))["base"])
    now = plain_values(load_recipe(ROOT / "recipes/demo_study.py", RunConfig))
    places = {"data.path", "evaluation.suites", "model.hf_path"}
    assert {name for name in stored | now if stored.get(name) != now.get(name)} <= places
