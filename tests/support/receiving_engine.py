"""A scripted engine that takes weights by broadcast, as far as the pool can see."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bapo_megatron.interfaces import Confirm
from bapo_megatron.types import BroadcastGroup, BucketSpec, WeightParts
from tests.support.sampling import ScriptedEngine, mixed


class ReceivingEngine(ScriptedEngine):
    """Writes down what it is asked to do in a broadcast."""

    transports = ("broadcast",)

    def __init__(self, name: str, ranks: int = 1, calls: list[str] | None = None) -> None:
        super().__init__(mixed, name)
        self.broadcast_ranks, self.calls = ranks, [] if calls is None else calls
        self.fails_at: str | None = None

    async def leave_group(self, name: str) -> None:
        await self._note(f"leave {name}")

    async def join_group(self, group: BroadcastGroup, first_rank: int) -> None:
        await self._note(f"join {group.name} at {first_rank}")

    async def load(self, weights: Path | WeightParts, version: int, confirm: Confirm) -> None:
        if isinstance(weights, Path):
            await super().load(weights, version, confirm)
            return
        await self._note("begin")
        async for part in weights:
            assert isinstance(part, BucketSpec)
            await self._note(f"receive {part.names[0]}")
        await self._note("end")
        await confirm(self.digest or "same")
        await self._note(f"version {version}")
        self.version = version
        await self._note("resume")

    async def _note(self, call: str) -> None:
        self.calls.append(f"{self.name} {call}")
        if self.fails_at == call:
            raise RuntimeError(f"{self.name} does not {call}")
        await asyncio.sleep(0)
