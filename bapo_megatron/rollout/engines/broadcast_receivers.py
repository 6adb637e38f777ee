"""The engines' side of a weight broadcast: which engines take part, and every step on all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from bapo_megatron.config import EngineConfig
from bapo_megatron.interfaces import ReceivesBroadcast
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.digest_quorum import DigestMismatch, IsSent
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.types import BroadcastGroup, BucketSpec

T = TypeVar("T")

_TIMEOUT_SHARE = 0.9
"""Share of the sender's timeout: the receivers' error comes first, because it names the engine."""

_ERROR_GRACE_S = 0.5


class WeightReceivers:
    """Engines that receive one broadcast together.

    In order: ``join`` once; then for each version ``begin``, ``receive`` for every bucket, ``finish``. All
    raise EngineError, which names the engines. After an error weights may be mixed. Engines that hang must be
    ended: they pass data on, and others may wait for them. The pool finds them when they do not take weights
    from disk (``engine_hangs``). Then let new receivers ``join`` anew.
    """

    def __init__(self, engines: Sequence[ReceivesBroadcast], timeout_s: float = 120.0) -> None:
        """``timeout_s``: longest wait for one bucket."""
        self.engines, self._timeout_s = list(engines), timeout_s
        self._group_name = ""

    @property
    def ranks(self) -> int:
        """Number of the engines' ranks in the broadcast group."""
        return sum(engine.broadcast_ranks for engine in self.engines)

    async def join(self, group: BroadcastGroup) -> None:
        """Join the sender's group, and first leave one of that name, which a failure has left behind."""
        self._group_name = group.name
        await self._on_all_engines(lambda engine: engine.leave_group(group.name, self._timeout_s))
        first_ranks, rank = {}, 1
        for engine in self.engines:
            first_ranks[engine.name] = rank
            rank += engine.broadcast_ranks
        await self._on_all_engines(
            lambda engine: engine.join_group(group, first_ranks[engine.name], self._timeout_s)
        )

    async def begin(self) -> None:
        """Stop sampling and be ready to receive."""
        await self._on_all_engines(lambda engine: engine.begin_update())

    async def receive(self, bucket: BucketSpec) -> None:
        """Take and load one bucket."""
        await self._on_all_engines(lambda engine: engine.receive(bucket, self._group_name, self._timeout_s))

    async def finish(self, version: int, is_sent: IsSent | None = None) -> str:
        """End the update, and sample again with weights of ``version``. Returns the digest of the weights.

        EngineError if the engines' weights differ, or are not those sent; then none samples from them.
        """
        digests = await self._on_all_engines(lambda engine: engine.end_update(self._timeout_s))
        for engine, digest in zip(self.engines, digests, strict=True):
            try:
                if is_sent is not None:
                    is_sent(engine.name, digest)
            except DigestMismatch as error:
                raise EngineError(f"{engine.name}: {error}") from error
        if len(set(digests)) != 1:
            all_digests = ", ".join(f"{e.name}: {d[:12]}" for e, d in zip(self.engines, digests, strict=True))
            raise EngineError(f"the engines have different weights after version {version}: {all_digests}")
        await self._on_all_engines(lambda engine: engine.set_version(version))
        await self._on_all_engines(lambda engine: engine.resume_after_update())
        return str(digests[0])  # without those of single tensors, which go no further

    async def _on_all_engines(self, call: Callable[[ReceivesBroadcast], Coroutine[Any, Any, T]]) -> list[T]:
        """Run ``call`` on all engines; their results.

        The first error ends the wait; errors of other engines that come with it are named.
        """
        tasks = [asyncio.create_task(call(engine)) for engine in self.engines]
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=_ERROR_GRACE_S)
        for task in waiting:
            task.cancel()
        if errors := [error for task in tasks if task not in waiting and (error := task.exception())]:
            raise EngineError("; ".join(map(str, errors))) from errors[0]
        return [task.result() for task in tasks]


class PoolBroadcast:
    """The engine pool as the receiver of a weight broadcast.

    In order: ``gather``; ``join`` if the engines are others than before; ``begin``; ``receive`` for every
    bucket; ``finish``. After an error ``fail``.
    """

    def __init__(self, pool: EnginePool, config: EngineConfig) -> None:
        self._pool, self._timeout_s = pool, _TIMEOUT_SHARE * 60 * config.update_minutes
        self._receivers = WeightReceivers([])
        self._is_joined = False
        self._ready_transitions = 0

    async def gather(self) -> tuple[int, bool]:
        """How many ranks the engines that will receive have together, and whether they are in a group.

        One that has come back is perhaps another process: then all join anew.
        """
        found = await self._pool.gather()
        if found != self._receivers.engines or self._ready_transitions != self._pool.ready_transitions:
            self._is_joined = False
        if not self._is_joined:
            self._receivers = WeightReceivers(found, self._timeout_s)
        return self._receivers.ranks, self._is_joined

    async def join(self, group: BroadcastGroup) -> None:
        """Join all engines to the sender's broadcast group."""
        await self._receivers.join(group)
        self._is_joined = True

    async def begin(self) -> None:
        """Pause sampling on all engines."""
        await self._receivers.begin()

    async def receive(self, bucket: BucketSpec) -> None:
        """Take one bucket."""
        await self._receivers.receive(bucket)

    async def finish(self, version: int, sent: SentDigests | None = None) -> str:
        """Confirm that all engines have the weights ``sent``, and resume sampling; returns their digest."""
        digest = await self._receivers.finish(version, partial(self._pool.sent_check.is_sent, sent))
        self._pool.broadcast_succeeded(version)
        self._ready_transitions = self._pool.ready_transitions
        return digest

    async def fail(self, reason: str) -> None:
        """The weights did not arrive: the engines are lost until they have others."""
        self._is_joined = False
        self._pool.broadcast_failed(reason)
