"""A scripted engine that takes weights by broadcast, as far as the pool can see."""

from __future__ import annotations

import asyncio

from bapo_megatron.types import BroadcastGroup, BucketSpec
from tests.support.sampling import ScriptedEngine, mixed


class ReceivingEngine(ScriptedEngine):
    """Writes down what it is asked to do in a broadcast."""

    def __init__(self, name: str, ranks: int = 1, calls: list[str] | None = None) -> None:
        super().__init__(mixed, name)
        self.broadcast_ranks, self.calls = ranks, [] if calls is None else calls
        self.fails_at: str | None = None

    async def leave_group(self, name: str, timeout_s: float) -> None:
        await self._note(f"leave {name}")

    async def join_group(self, group: BroadcastGroup, first_rank: int, timeout_s: float) -> None:
        await self._note(f"join {group.name} at {first_rank}")

    async def begin_update(self) -> None:
        await self._note("begin")

    async def receive(self, bucket: BucketSpec, group_name: str, timeout_s: float) -> None:
        await self._note(f"receive {bucket.names[0]} in {group_name}")

    async def end_update(self, timeout_s: float) -> str:
        await self._note("end")
        return self.digest or "same"

    async def set_version(self, version: int) -> None:
        await self._note(f"version {version}")
        self.version = version

    async def resume_after_update(self) -> None:
        await self._note("resume")

    async def _note(self, call: str) -> None:
        self.calls.append(f"{self.name} {call}")
        if self.fails_at == call:
            raise RuntimeError(f"{self.name} does not {call}")
        await asyncio.sleep(0)
