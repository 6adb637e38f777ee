"""The servers' side of a broadcast of weights: every step on all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from bapo_megatron.rollout.engines.sglang.http_client import ServerError, SglangServer
from bapo_megatron.types import BroadcastGroup, BucketSpec

T = TypeVar("T")

_MORE_REASONS_S = 0.5


class WeightReceivers:
    """Servers that take one broadcast together. They must be paused, or have no request.

    In order: ``join`` once; then for each version ``begin``, ``receive`` for every bucket, ``finish``. All
    raise ServerError, which names the servers. After an error weights may be mixed. Servers that hang must be
    ended: they pass data on, and others may wait for them. The fleet finds them when they do not take weights
    from disk (``engine_hangs``). Then let new receivers ``join`` anew.
    """

    def __init__(
        self, servers: Sequence[SglangServer], ranks_each: int = 1, timeout_s: float = 120.0
    ) -> None:
        """``ranks_each``: tensor-parallel ranks of a server. ``timeout_s``: longest wait for one bucket."""
        self._servers, self._ranks_each, self._timeout_s = list(servers), ranks_each, timeout_s
        self._group_name = ""

    @property
    def ranks(self) -> int:
        """How many ranks they have in the group."""
        return len(self._servers) * self._ranks_each

    async def join(self, group: BroadcastGroup) -> None:
        """Join the sender's group, and first leave one of that name, which a failure has left behind."""
        self._group_name = group.name
        await self._everywhere(lambda server: server.leave_weight_group(group.name, self._timeout_s))
        offsets = {server: 1 + n * self._ranks_each for n, server in enumerate(self._servers)}
        await self._everywhere(
            lambda server: server.join_weight_group(group, offsets[server], self._timeout_s)
        )

    async def begin(self) -> None:
        """Be ready to receive. An update that a failure has left open is ended first."""
        await self._everywhere(lambda server: server.end_update())
        await self._everywhere(lambda server: server.begin_update())

    async def receive(self, bucket: BucketSpec) -> None:
        """Take and load one bucket."""
        await self._everywhere(lambda server: server.receive(bucket, self._group_name, self._timeout_s))

    async def finish(self, version: int, flush: bool) -> str:
        """End the update: the weights have ``version`` from now on. Returns their digest.

        ``flush``: see ``SglangServer.update_from_disk``. ServerError if the servers' weights differ.
        """
        await self._everywhere(lambda server: server.end_update())
        if flush:
            await self._everywhere(lambda server: server.flush_cache())
        digests = await self._everywhere(lambda server: server.checksum(self._timeout_s))
        if len(set(digests)) != 1:
            told = ", ".join(f"{s.url}: {d[:12]}" for s, d in zip(self._servers, digests, strict=True))
            raise ServerError(f"the servers have different weights after version {version}: {told}")
        await self._everywhere(lambda server: server.set_version(version))
        return digests[0]

    async def _everywhere(self, call: Callable[[SglangServer], Coroutine[Any, Any, T]]) -> list[T]:
        """All results. The first error ends the wait; errors of other servers that come with it are told."""
        tasks = [asyncio.create_task(call(server)) for server in self._servers]
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=_MORE_REASONS_S)
        for task in waiting:
            task.cancel()
        if errors := [error for task in tasks if task not in waiting and (error := task.exception())]:
            raise ServerError("; ".join(map(str, errors))) from errors[0]
        return [task.result() for task in tasks]
