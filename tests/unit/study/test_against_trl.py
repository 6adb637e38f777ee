"""The comparison with TRL: its meter, on numbers made up by hand."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from benchmarks.against_trl_sides import GENERATION, REST, REWARD, UPDATE, WEIGHTS, Clocks, Meter


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


def test_seconds_go_to_the_innermost_phase_and_the_samplers_to_generation() -> None:
    """The sampler generates, whatever the trainer does, but while weights are sent."""
    clocks = PlayedClocks()
    meter = Meter(clocks)
    meter.begin()  # the start is not a part of a step
    clocks.use(trainer=0.5)
    with meter.phase(UPDATE):
        clocks.use(trainer=2.0)
        with meter.phase(REWARD):
            clocks.use(trainer=0.25)
        clocks.use(trainer=1.0)
    with meter.phase(WEIGHTS):
        clocks.use(trainer=0.125, sampler=0.375)
    clocks.use(sampler=4.0, worker=0.0625)
    assert meter.switch(UPDATE) == REST
    clocks.use(sampler=1.0, worker=0.0625)
    meter.switch(REST)
    expected = {REST: 0.5, UPDATE: 3.0, REWARD: 0.375, WEIGHTS: 0.5, GENERATION: 5.0}
    assert meter.seconds == expected
