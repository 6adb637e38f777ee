"""Environment that only waits, for ``sampler_scale.py``, in place of a program or a service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from bapo_megatron.environment import Environment, Reply, Turn


class WaitingTool(Environment):
    """Environment whose ``turns`` steps each wait ``mean_s`` seconds +- 50 %; the last one ends the episode.

    The reward is random.
    """

    resume = "restore"
    _steps = 0

    async def step(self, turn: str) -> Reply:
        await asyncio.sleep(self.settings["mean_s"] * random.uniform(0.5, 1.5))
        self._steps += 1
        if self._steps == self.settings["turns"]:
            return Reply(None, reward=float(random.random() < 0.5))
        return Reply("done")

    def restore(self, turns: Sequence[Turn], note: Any) -> None:
        self._steps = len(turns) // 2
