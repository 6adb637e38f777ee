"""The sampler's process, whose state also tells its id and its number of threads."""

from __future__ import annotations

import os
from typing import Any

import torch

from bapo_megatron.rollout.sampler import process
from bapo_megatron.rollout.sampler.process import Service

_sound = Service._state


async def _state(self: Service) -> dict[str, Any]:
    return {**await _sound(self), "pid": os.getpid(), "threads": torch.get_num_threads()}


if __name__ == "__main__":
    Service._state = _state  # type: ignore[method-assign]
    process.main()
