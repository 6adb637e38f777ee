"""The comparison with TRL: its meter, the check before the timing, its page, on numbers made up by hand."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import against_trl
from benchmarks.against_trl import Case, compare
from benchmarks.against_trl_sides import (
    GENERATION,
    REST,
    REWARD,
    UPDATE,
    WEIGHTS,
    Batch,
    Clocks,
    Meter,
    Settings,
)

DEMO = against_trl.MODELS["demo"]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    places = {"model": tmp_path, "prompts": tmp_path / "prompts.jsonl", "folder": tmp_path}
    sizes = {"prompts_per_step": 2, "group_size": 16, "response_tokens": 8, "updates": 1, "micro_batch": 4}
    return Case("demo", Settings(core=0, steps=3, **places, **sizes))


class PlayedClocks:
    """Clocks set by hand: of the trainer, of its sampler, and of the sampler's worker."""

    def __init__(self) -> None:
        self.trainer, self.below = 5.0, {"sampler": (3.0, True), "worker": (1.0, False)}

    def __call__(self, known: Collection[Any] | None) -> Clocks:
        return self.trainer, dict(self.below)

    def use(self, trainer: float = 0.0, sampler: float = 0.0, worker: float = 0.0) -> None:
        self.trainer += trainer
        self.below["sampler"] = (self.below["sampler"][0] + sampler, True)
        self.below["worker"] = (self.below["worker"][0] + worker, False)


def test_seconds_go_to_the_innermost_phase() -> None:
    clocks = PlayedClocks()
    meter = Meter(clocks)
    meter.begin()  # the start is not a part of a step
    clocks.use(trainer=0.5)
    with meter.phase(UPDATE):
        clocks.use(trainer=2.0)
        with meter.phase(REWARD):
            clocks.use(trainer=0.25)
        clocks.use(trainer=1.0)
    assert meter.seconds == {REST: 0.5, UPDATE: 3.0, REWARD: 0.25, GENERATION: 0.0}


def test_seconds_of_the_sampler_and_of_its_workers() -> None:
    """The sampler generates, whatever the trainer does, but while weights are sent."""
    clocks = PlayedClocks()
    meter = Meter(clocks)
    meter.begin()
    with meter.phase(WEIGHTS):
        clocks.use(trainer=0.125, sampler=0.375)
    clocks.use(sampler=4.0, worker=0.0625)
    assert meter.switch(UPDATE) == REST
    clocks.use(sampler=1.0, worker=0.0625)
    meter.switch(REST)
    expected = {WEIGHTS: 0.5, GENERATION: 5.0, REWARD: 0.125}
    assert {name: seconds for name, seconds in meter.seconds.items() if seconds} == expected


class PlayedSide:
    """Answers that are ``gap`` away from -2.0 a token, ``loss_gap`` from a loss of 0.25."""

    def __init__(self, gap: float = 0.0, loss_gap: float = 0.0) -> None:
        self.gap, self.loss_gap = gap, loss_gap
        self.old: list[np.ndarray] = []

    def ask(self, what: str, batch: Batch) -> Any:
        if what == "log_probs":
            return np.full(batch.old_log_probs.shape, -2.0 + self.gap)
        self.old.append(batch.old_log_probs)
        return 0.25 + self.loss_gap


@pytest.mark.parametrize(
    ("gap", "loss_gap", "agrees"), [(5e-5, 5e-6, True), (2e-4, 0.0, False), (0.0, 2e-5, False)]
)
def test_the_check_sees_log_probs_and_loss(case: Case, gap: float, loss_gap: float, agrees: bool) -> None:
    ours, trl = PlayedSide(), PlayedSide(gap, -loss_gap)
    compare(case, ours, trl)
    assert (case.log_prob_gap, case.loss_gap) == (pytest.approx(gap), pytest.approx(loss_gap))
    assert case.agrees is agrees
    assert (ours.old[0] == trl.old[0]).all()
    clipped = np.abs(np.exp(-2.0 - ours.old[0]) - 1) > 0.2
    assert 0.1 < clipped.mean() < 0.6  # so the bounds have a say in the loss
