"""Tool that only waits, for ``sampler_scale.py``: an environment whose steps are a program's, or a service's.

Only the standard library is imported, as a worker of environments does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from bapo_megatron.environment import Environment, Reply, Turn


class WaitingTool(Environment):
    """Each of ``turns`` turns waits for ``mean_s`` seconds, give or take a half; the last one ends it.

    The reward is drawn. Made by a worker of environments.
    """

    resume = "restore"
    _steps = 0

    async def step(self, turn: str) -> Reply:
        """Wait."""
        await asyncio.sleep(self.settings["mean_s"] * random.uniform(0.5, 1.5))
        self._steps += 1
        if self._steps == self.settings["turns"]:
            return Reply(None, reward=float(random.random() < 0.5))
        return Reply("done")

    def restore(self, turns: Sequence[Turn], note: Any) -> None:
        """Count the turns."""
        self._steps = len(turns) // 2
