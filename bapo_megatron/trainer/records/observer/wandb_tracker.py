"""Weights & Biases tracker: one W&B run for all starts of a run directory.

In the observer's process. Used by ``__main__.py``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bapo_megatron.trainer.records.observer.state import NOTHING
from bapo_megatron.trainer.records.observer.tracker import TrackedRun
from bapo_megatron.trainer.records.observer.wandb_files import steps_with


class WandbTracker:
    """The ``Tracker`` of W&B. WANDB_MODE=offline keeps the run in RUN/trackers/wandb, or in WANDB_DIR/wandb.

    ``write`` returns before W&B has stored the row; at a restart ``last_step`` tells what it has.
    ``Observer`` makes and calls it.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        self._files = folder / "wandb"
        self._id = run.id
        self._run: Any = wandb.init(
            project=run.project,
            id=run.id,
            resume="allow",
            name=run.name,
            config=run.config,
            dir=str(folder),
            settings=wandb.Settings(console="off"),
        )

    def last_step(self, metric: str) -> int:
        # W&B writes some time after `log`: after a kill its server, or its files, have fewer steps.
        if self._run.offline:
            return max(steps_with(self._files, self._id, metric), default=NOTHING)
        return int(self._run.starting_step) - 1

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()
