"""The parts of a run that a test of one step needs."""

from __future__ import annotations

from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.runtime.watchdog import Watchdog
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.clip_bounds import Clipping


class Told:
    """An ``PreemptionSignal`` that has a reason from the given question on; without one it never has."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.asked = at, 0

    def reason(self) -> str | None:
        self.asked += 1
        return "told to stop" if self.at is not None and self.asked >= self.at else None

    def saved(self, seconds: float) -> None: ...


def run_of(config: RunConfig, policy: Any, clip_bounds: Clipping, checkpoints: Any = None) -> Run:
    """One that samples nothing, records nothing, and is told nothing."""
    nothing: Any = None
    told: Any = Told()
    watchdog = Watchdog(minutes=0)
    return Run(config, policy, clip_bounds, nothing, checkpoints, None, None, 1, True, None, told, watchdog)
