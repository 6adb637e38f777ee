"""The engines' side of a broadcast of weights: which take part, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bapo_megatron.config import SglangConfig
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.engines.sglang.weight_receivers import WeightReceivers
from bapo_megatron.types import BroadcastGroup, BucketSpec

_SOONER = 0.9
"""Of the sender's timeout: the receivers' error comes first, because it names the server."""


class PoolBroadcast:
    """In order: ``gather``; ``join`` if the engines are others than before; ``begin``; ``receive`` for every
    bucket; ``finish``. After an error ``fail``."""

    def __init__(self, pool: EnginePool, config: SglangConfig) -> None:
        self._pool, self._config = pool, config
        self._engines: list[SglangEngine] = []
        self._receivers = self._receivers_of([])
        self._is_joined = False
        self._comings = 0

    async def gather(self) -> tuple[int, bool]:
        """How many ranks the engines that will receive have together, and whether they are in a group.

        One that has come back is perhaps another process: then all join anew.
        """
        found = [engine for engine in await self._pool.gather() if isinstance(engine, SglangEngine)]
        if found != self._engines or self._comings != self._pool.comings:
            self._is_joined = False
        if not self._is_joined:
            self._engines, self._receivers = found, self._receivers_of(found)
        return self._receivers.ranks, self._is_joined

    async def join(self, group: BroadcastGroup) -> None:
        """All of them join the sender's group."""
        await self._receivers.join(group)
        self._is_joined = True

    async def begin(self) -> None:
        """All of them stop sampling."""
        await asyncio.gather(*(engine.hold() for engine in self._engines))
        await self._receivers.begin()

    async def receive(self, bucket: BucketSpec) -> None:
        """Take one bucket."""
        await self._receivers.receive(bucket)

    async def finish(self, version: int) -> str:
        """All of them have the same weights now, and sample again; their digest."""
        digest = await self._receivers.finish(version, flush=self._config.on_update == "retract")
        await asyncio.gather(*(engine.release() for engine in self._engines))
        self._pool.adopt(version)
        self._comings = self._pool.comings
        return digest

    async def fail(self, reason: str) -> None:
        """The weights did not arrive: the engines are lost until they have others."""
        self._is_joined = False
        self._pool.disown(reason)

    def _receivers_of(self, engines: Sequence[SglangEngine]) -> WeightReceivers:
        timeout_s = _SOONER * 60 * self._config.update_minutes
        return WeightReceivers([engine.server for engine in engines], self._config.tensor, timeout_s)
