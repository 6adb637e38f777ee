"""A scripted engine that gives up its memory, and the sampler of a run on such engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.colocated_pool import ColocatedPool
from bapo_megatron.types import BucketSpec, GenerateRequest, Generation, WeightParts
from tests.support.sampling import ScriptedEngine, World, mixed

State = Literal["awake", "asleep"]


class SleepingEngine(ScriptedEngine):
    """Notes what must not happen to an engine without memory.

    The handles that it gets are parts of the name of its weights: ``v`` and ``1`` make those of the folder
    ``v1``.
    """

    transports = ("ipc",)

    def __init__(self, name: str) -> None:
        super().__init__(mixed, name)
        self.state: State = "awake"
        self.wrongs: list[str] = []
        self.calls: list[str] = []
        """Of those that concern its memory."""
        self._one_load = asyncio.Lock()
        """As of ``SglangEngine``: one that continues keeps the next waiting."""
        self.fails: str | None = None
        """A call that raises."""
        self.hangs: str | None = None
        """A call that never ends, though the engine answers its health check."""

    def restart(self) -> None:
        """A new process takes its place."""
        self.state, self.version, self.fails, self.hangs = "awake", 0, None, None

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.state != "awake":
            self.wrongs.append("generate")
        return await super().generate(request)

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        async with self._one_load:
            if self.state != "awake":
                self.wrongs.append("load")
            await super().load(folder, version, confirm)

    async def abort(self) -> None:
        self.calls.append("abort")
        await super().abort()

    async def release_memory(self) -> None:
        await self._begin("release", "awake")
        await super().abort()
        self.state = "asleep"

    async def wake(self, weights: Path | WeightParts, version: int, confirm: Confirm) -> None:
        async with self._one_load:
            if isinstance(weights, Path):
                await self._begin("wake", "asleep")
                self.state = "awake"
                await super().load(weights, version, confirm)
            else:
                await self._wake_by_handles(weights, version, confirm)

    async def _wake_by_handles(self, parts: WeightParts, version: int, confirm: Confirm) -> None:
        await self._begin("begin", "asleep")
        received = ""
        async for part in parts:
            await self._begin("receive", "asleep")
            assert not isinstance(part, BucketSpec)
            (handle,) = part
            received += handle.decode()
        await self._begin("confirm", "asleep")
        self.version = version
        await confirm(self.digest or received)
        await self._begin("finish", "asleep")
        self.state = "awake"

    async def _begin(self, call: str, state: State) -> None:
        self.calls.append(call)
        if self.state != state:
            self.wrongs.append(call)
        if self.fails == call:
            raise OSError(f"the {call} failed")
        if self.hangs == call:
            await asyncio.Event().wait()


@asynccontextmanager
async def sampling_in_turns(
    world: World, first_step: int = 1, admitted: bool = True, rounds: bool = True
) -> AsyncIterator[ColocatedPool]:
    """The pool of a sampler on engines that share their GPUs."""
    async with world.sampling(first_step, rounds=rounds, kind=ColocatedPool):
        assert isinstance(world.pool, ColocatedPool)
        if admitted:
            await world.pool.admit()
        yield world.pool
