"""The parts of a run that a test of one step needs."""

from __future__ import annotations

from typing import Any

from bapo_megatron.algo.advantages import build_advantage
from bapo_megatron.config import RunConfig
from bapo_megatron.runtime.guards import Watchdog
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.gpu_handover import GpuHandover
from bapo_megatron.trainer.update_loss import UpdateLoss


class Asked:
    """A ``PreemptionSignal`` that asks the run to stop from the given call of ``reason`` on; or never."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.asked = at, 0

    def reason(self) -> str | None:
        self.asked += 1
        return "told to stop" if self.at is not None and self.asked >= self.at else None

    def saved(self, seconds: float) -> None: ...


def run_of(config: RunConfig, policy: Any, update_loss: UpdateLoss, checkpoints: Any = None) -> Run:
    """A run that samples nothing, records nothing, and is never asked to stop."""
    nothing: Any = None
    never: Any = Asked()
    return Run(
        config=config,
        policy=policy,
        advantage=build_advantage(config.algorithm),
        update_loss=update_loss,
        sync=nothing,
        handover=GpuHandover(config, policy, None, None, lambda _event: None),
        checkpoints=checkpoints,
        sampler=None,
        recorder=None,
        exports=None,
        first_step=1,
        has_work=True,
        partial_step=None,
        preemption=never,
        watchdog=Watchdog(minutes=0),
    )
