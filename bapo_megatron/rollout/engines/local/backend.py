"""The ``local`` backend: one engine in the sampler's process, and no servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bapo_megatron.config import RolloutConfig, RunConfig
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.backend import EngineBackend


class LocalBackend(EngineBackend):
    """The backend of the embedded engine: a Hugging Face model in the sampler's process.

    Its log-probs depend, in their last bits, on the batch: so it samples in rounds, each of which begins when
    the one before is finished.
    """

    rounds = True
    returns_routes = True

    def max_in_flight(self, rollout: RolloutConfig) -> int:
        return rollout.max_batch

    def weight_digester(self, rollout: RolloutConfig, hf_path: Path, device: str) -> None:
        """None, nothing to compare: the engine checks names and shapes of all weights that it loads."""

    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        # transformers takes seconds to import, and the trainer needs none of it.
        from bapo_megatron.rollout.engines.local.engine import LocalEngine, LocalModel

        model, max_batch = config.model, config.rollout.max_batch
        loaded = await asyncio.to_thread(LocalModel, model.hf_path, max_batch, model.dtype, device)
        return [LocalEngine(loaded)]
